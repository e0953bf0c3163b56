"""What prompts teach of products in 8 bits, and dense prompts that are then read so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest

from edgeh2o import LLM, DenseConfig, HeadwiseConfig, _core
from edgeh2o.attention.budget_table import write_table
from edgeh2o.attention.head_budgets import TOO_SHORT, UNKNOWN
from edgeh2o.attention.kept_profiles import find_profile, profile_path
from edgeh2o.engine import payoff
from edgeh2o.engine.profile import profile_prompt
from edgeh2o.engine.rounding_probe import RoundingProbe
from edgeh2o.evaluation.reading import prefill_prompt
from edgeh2o.model_config import DecoderConfig
from tests.engine.unknown_models import GREEDY, ONE_TOKEN, load, random_prompt, unknown_model
from tests.tiny_models import TinyModelFactory

if TYPE_CHECKING:
    from edgeh2o.layer_config import LatentHeads

SMALL = HeadwiseConfig(budget=600)


@pytest.fixture
def path(tiny_model: TinyModelFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return unknown_model(tiny_model, tmp_path, monkeypatch)


@pytest.fixture
def llm(path: Path) -> Iterator[LLM]:
    with load(path, SMALL) as loaded:
        yield loaded


@pytest.mark.parametrize(("error", "expected"), [(1.9, "int8"), (1.91, "f32"), (None, "f32")])
def test_dense_prompts_are_rounded_where_that_was_shown_to_change_little(
    path: Path, monkeypatch: pytest.MonkeyPatch, error: float | None, expected: str
) -> None:
    if "int8" not in _core.attention_precisions():
        pytest.skip("no int8 products on this machine")
    monkeypatch.setattr(_core, "best_attention_precision", lambda: "f32")
    with LLM(path) as llm:
        prompt = random_prompt(llm)
        llm.generate(prompt, ONE_TOKEN)
        known = find_profile(llm.config.fingerprint)
        assert known is not None and known.rounding_error is not None
        write_table(replace(known, rounding_error=error), profile_path(known.fingerprint))
    monkeypatch.setattr(payoff, "LEAST_SAVING", 1.0)  # sparse never pays
    with LLM(path) as llm:
        stats = llm.generate(prompt, ONE_TOKEN).stats
        assert stats.attention["table"] == TOO_SHORT
        assert stats.attention_precision == expected
        assert llm.generate(prompt[:1000], ONE_TOKEN).stats.attention_precision == "f32"


@pytest.mark.parametrize(("error", "expected"), [(1.9, "int8"), (1.91, "f32")])
def test_so_are_sparse_prompts(
    path: Path, monkeypatch: pytest.MonkeyPatch, error: float, expected: str
) -> None:
    """The rest of the first one, and the second from its beginning."""
    if "int8" not in _core.attention_precisions():
        pytest.skip("no int8 products on this machine")
    monkeypatch.setattr(_core, "best_attention_precision", lambda: "f32")
    monkeypatch.setattr(RoundingProbe, "error_percent", property(lambda _: error))
    with load(path) as llm:
        for seed in (0, 1):
            stats = llm.generate(random_prompt(llm, 3000, seed=seed), ONE_TOKEN).stats
            assert stats.attention_precision == expected
            assert stats.attention["table"].startswith("profile")
            assert stats.pairs_computed < stats.pairs_dense


@pytest.mark.parametrize("keep_cache", [False, True])
@pytest.mark.parametrize("may_be_sparse", [False, True])
@pytest.mark.parametrize(("error", "expected"), [(1.9, "int8"), (1.91, "f32"), (None, "f32")])
def test_so_is_the_dense_rest_of_the_prompt_that_shows_it(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: float | None,
    expected: str,
    may_be_sparse: bool,
    keep_cache: bool,
) -> None:
    """Whether it began as one that would be read sparse, which its profile says would not pay."""
    if "int8" not in _core.attention_precisions():
        pytest.skip("no int8 products on this machine")
    monkeypatch.setattr(_core, "best_attention_precision", lambda: "f32")
    monkeypatch.setattr(RoundingProbe, "error_percent", property(lambda _: error))
    answers = iter([may_be_sparse, False])
    monkeypatch.setattr(payoff, "saves_time", lambda *_, **__: next(answers, False))
    with load(path) as llm:
        prompt = random_prompt(llm, 3000)
        answer = llm.generate(prompt, GREEDY, keep_cache=keep_cache)
        stats = answer.stats
        assert stats.attention_precision == expected
        assert stats.attention["table"] == (TOO_SHORT if may_be_sparse else UNKNOWN)
        assert stats.pairs_computed == stats.pairs_dense and stats.heads_read_densely == 0
        assert ("1,024 tokens read dense and profiled" in stats.note) == may_be_sparse
        runner: Any = llm.start_runner(3200, attention=DenseConfig())
        runner.prefill(prompt[:1024], is_last=False)
        runner.read_rest(expected, reads_all=True)
        logits = prefill_prompt(runner, prompt[1024:], n_read=1024)
        assert int(logits.argmax()) == answer.token_ids[0]
        if not keep_cache:
            return
        # What goes on from it does so, in a cache that grows too.
        longer = np.concatenate([prompt, answer.token_ids, random_prompt(llm, 900, seed=1)])
        stats = llm.generate(longer, ONE_TOKEN, keep_cache=True).stats
        assert stats.cached_tokens >= 3000 and stats.attention_precision == expected
        assert stats.pairs_computed == stats.pairs_dense


def test_what_rounding_is_off_by_is_that_of_the_attention(llm: LLM) -> None:
    if "int8" not in _core.attention_precisions():
        pytest.skip("no int8 products on this machine")
    measured = profile_prompt(llm.model, random_prompt(llm), threads=1)
    assert measured is not None and measured.rounding_error is not None
    config, rng = llm.config, np.random.default_rng(0)
    assert isinstance(config, DecoderConfig)
    probe = RoundingProbe(config, 256, threads=1)
    q, k, v = (
        rng.standard_normal((300, n * config.head_dim), np.float32)
        for n in (config.n_heads, config.n_kv_heads, config.n_kv_heads)
    )
    outputs = {}
    for precision in ("f32", "int8"):
        attention = _core.ChunkedAttention(
            _core.dense_policy(),
            config.n_heads,
            config.n_kv_heads,
            config.head_dim,
            chunk_size=256,
            batch_size=256,
            max_context=256,
            scale=config.attention_scale,
            threads=1,
            precision=precision,
        )
        rows = [part[:256].reshape(256, -1, config.head_dim) for part in (q, k, v)]
        outputs[precision] = attention.run(0, *rows, is_last=True).reshape(256, -1)[128:]
    exact = np.concatenate([np.zeros((128, q.shape[1])), outputs["f32"]])
    for layer in range(2):
        probe(layer, q, k, v, exact)
    off = np.linalg.norm(outputs["int8"] - outputs["f32"]) / np.linalg.norm(outputs["f32"])
    assert probe.error_percent == pytest.approx(100 * off) and 0.1 < 100 * off < 5
    plain, large = config.layers[0], replace(config.layers[0], has_large_keys=True)
    many = RoundingProbe(replace(config, layers=(large, *9 * [plain])), 256, threads=1)
    for layer in range(10):  # of the other nine every second
        many(layer, q, k, v, exact if layer % 2 else 2 * exact)
    assert many.error_percent == pytest.approx(100 * off)
    silent = RoundingProbe(replace(config, latent=cast("LatentHeads", object())), 256, threads=1)
    silent(0, q, k, v, q)
    assert silent.error_percent is None
