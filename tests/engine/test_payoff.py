"""Prompts are read dense where a sparse prefill would not be faster."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeh2o import LLM, H2OConfig, HeadwiseConfig, PrefillConfig, SamplingParams
from edgeh2o.attention.budget_table import write_table
from edgeh2o.attention.decode_quality import DecodeQuality
from edgeh2o.attention.head_budgets import TOO_SHORT, UNKNOWN, keys_per_query
from edgeh2o.config import RuntimeConfig
from edgeh2o.engine import payoff
from edgeh2o.engine.calibration import LEVELS
from edgeh2o.engine.context_size import CONTEXT_STEP
from edgeh2o.engine.payoff import choose_reading, count_products, saves_time
from edgeh2o.engine.payoff_lengths import describe_lengths
from edgeh2o.engine.plan import RunPlan
from edgeh2o.model_config import DecoderConfig
from tests.budget_tables import harmless_table

ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1)
# What random weights attend to no memory set keeps.
UNGUARDED = PrefillConfig(max_error=100)


@pytest.fixture
def table(path: Path, tmp_path: Path) -> str:
    """Of heads that need 64 keys each."""
    with LLM(path) as llm:
        made = harmless_table(llm.config, 64, (0.0,) * len(LEVELS))
    write_table(made, tmp_path / "tiny.json")
    return str(tmp_path / "tiny.json")


def prompt_of(llm: LLM, n_tokens: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.integers(3, llm.config.vocab_size, n_tokens).astype(np.int32)


@pytest.mark.parametrize(("n_tokens", "most"), [(1, 0.5), (10, 3), (10, 10), (10, 40), (1000, 64)])
def test_mean_keys_are_those_of_all_queries(n_tokens: int, most: float) -> None:
    positions = np.linspace(0, n_tokens, 100_001)
    expected = np.minimum(positions, most).mean()
    assert keys_per_query(n_tokens, most) == pytest.approx(expected, rel=1e-4)


def test_products_are_those_of_the_weights(path: Path) -> None:
    with LLM(path) as llm:
        config = llm.config
    assert isinstance(config, DecoderConfig)
    weights, per_key = count_products(config)
    per_layer = 2 * config.model_dim * config.head_dim * (config.n_heads + config.n_kv_heads)
    per_layer += 3 * config.model_dim * config.layers[0].ffn_dim
    assert weights == config.n_layers * per_layer
    assert per_key == 2 * config.n_layers * config.n_heads * config.head_dim


def test_fewer_keys_and_longer_prompts_pay(path: Path) -> None:
    with LLM(path) as llm:
        config = llm.config
    assert isinstance(config, DecoderConfig)
    assert not saves_time(config, "f32", 4096, 2048)  # as many
    assert saves_time(config, "f32", 16384, 500)
    assert not saves_time(config, "f32", 300, 140)
    # The more attention costs the earlier.
    n = next(n for n in range(256, 16384, 64) if saves_time(config, "int8", n, n / 4))
    assert saves_time(config, "f32", n, n / 4)


H100_RATE = 300 * 1.98e9 * 132
ORIN_RATE = 300 * 0.6e9 * 8


@pytest.mark.parametrize(
    ("rate", "n_tokens", "keys", "is_sparse"),
    [  # what an H100 did: 70,200 dense and 51,400 sparse; 50,000, 44,800; 35,700, 43,100 tokens/s
        (H100_RATE, 4096, 928, False),
        (H100_RATE, 16384, 1201, False),
        (H100_RATE, 32768, 1255, True),
        (ORIN_RATE, 4096, 928, False),
        (ORIN_RATE, 16384, 1201, True),  # a wait costs it little
        (0.0, 4096, 928, True),  # how fast it is is not known
    ],
)
def test_a_gpu_counts_what_it_waits_for(
    table: str, path: Path, monkeypatch: pytest.MonkeyPatch, rate: float, n_tokens: int,
    keys: float, is_sparse: bool,
) -> None:  # fmt: skip
    attention, settings = HeadwiseConfig(budget_table=table), (PrefillConfig(), RuntimeConfig())
    with LLM(path) as llm:
        model, plan = llm.model, RunPlan.of(llm.config, attention, *settings, "cuda:0", True, rate)
    assert plan.chunk_size == 1024
    assert isinstance(plan.config, DecoderConfig)
    # Llama-3.2-1B: 16 layers with 32 heads of 64.
    layer = replace(plan.config.layers[0], n_heads=32)
    config = replace(plan.config, layers=(layer,) * 16)
    monkeypatch.setattr(HeadwiseConfig, "expected_keys", lambda self, resolved, n, layers: keys)
    monkeypatch.setattr(payoff, "count_products", lambda config: (0.97e9, 16 * 32 * 128))
    chosen = choose_reading(replace(plan, config=config), model, n_tokens)
    assert (chosen.attention.source != TOO_SHORT) == is_sparse


def test_the_length_from_which_prompts_are_sparse_is_said(path: Path, table: str) -> None:
    attention = HeadwiseConfig(budget_table=table)
    with LLM(path) as llm:
        model = llm.model

        def plan_of(attention: HeadwiseConfig, context_size: int | None = None) -> RunPlan:
            runtime = RuntimeConfig(context_size=context_size)
            return RunPlan.of(llm.config, attention, PrefillConfig(), runtime)

        def is_dense(n_tokens: int) -> bool:
            return choose_reading(plan_of(attention), model, n_tokens).attention.reads_all

        said = describe_lengths(plan_of(attention), model)["prompts"]
        found = re.match(r"sparse in contexts of ([\d,]+) tokens and more: ", said)
        assert found, said
        least = int(found[1].replace(",", ""))
        assert is_dense(least - CONTEXT_STEP) and not is_dense(least)
        fewer = least - CONTEXT_STEP
        short = describe_lengths(plan_of(attention, fewer), model)["prompts"]
        expected = f"read everything up to {fewer:,} tokens: less would save under 8 % of the time"
        assert short == expected
        unknown = describe_lengths(plan_of(HeadwiseConfig()), model)["prompts"]
        assert "once the model is profiled" in unknown
        assert "prompts" not in describe_lengths(plan_of(HeadwiseConfig(budget=64)), model)


def test_short_prompts_are_dense_and_long_ones_sparse(path: Path, table: str) -> None:
    with LLM(path, attention=HeadwiseConfig(budget_table=table), prefill=UNGUARDED) as llm:
        for n_tokens, is_sparse in ((400, False), (3000, True), (400, False), (100, True)):
            stats = llm.generate(prompt_of(llm, n_tokens), ONE_TOKEN).stats
            assert (stats.attention["table"] != TOO_SHORT) == is_sparse, n_tokens
            assert (stats.pairs_computed < stats.pairs_dense) == (n_tokens == 3000)
            assert stats.note == ""
    with LLM(path, attention=HeadwiseConfig(budget=64)) as llm:  # as it was asked for
        stats = llm.generate(prompt_of(llm, 400), ONE_TOKEN).stats
        assert stats.pairs_computed < stats.pairs_dense


def test_a_dense_prompt_gives_what_dense_attention_gives(path: Path, table: str) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(path, attention=HeadwiseConfig(budget_table=table)) as llm:
        ids = llm.generate(prompt_of(llm, 400), greedy).token_ids
    with LLM(path, attention="dense") as llm:
        assert llm.generate(prompt_of(llm, 400), greedy).token_ids == ids


def test_what_does_not_pay_is_said_and_teaches_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payoff, "LEAST_SAVING", 1.0)
    with LLM(path, attention_precision="f32") as llm:
        stats = llm.generate(prompt_of(llm, 3000), ONE_TOKEN).stats
        assert stats.attention == {"algorithm": "headwise", "table": TOO_SHORT}
        assert "would not be faster" in stats.note
        assert llm.generate(prompt_of(llm, 500), ONE_TOKEN).stats.note == ""
        monkeypatch.setattr(payoff, "LEAST_SAVING", 0.0)
        stats = llm.generate(prompt_of(llm, 8000), ONE_TOKEN).stats
        assert stats.attention["table"] == "profile (1 prompt)"


def test_tokens_after_a_dense_prompt_go_by_budgets(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payoff, "LEAST_SAVING", 1.0)
    quality = DecodeQuality(budget=64, length=4096, kl={"prose": 0.0})
    with LLM(path) as llm:
        made = harmless_table(llm.config, 64, (0.0,) * len(LEVELS))
    write_table(replace(made, decode=quality), tmp_path / "decode.json")
    three = replace(ONE_TOKEN, max_tokens=3)
    read = {}
    for way in ("auto", "dense"):
        attention = HeadwiseConfig(budget_table=str(tmp_path / "decode.json"), decode_attention=way)
        with LLM(path, attention=attention) as llm:
            stats = llm.generate(prompt_of(llm, 3000), three).stats
        assert (stats.attention["table"], stats.pairs_computed) == (TOO_SHORT, stats.pairs_dense)
        assert (stats.attention.get("decode") == "headwise") == (way == "auto")
        read[way] = stats.cache_bytes_per_token
    assert read["dense"] is not None and read["auto"] is not None
    assert read["auto"] < read["dense"] / 5


def test_a_profile_that_does_not_pay_leaves_the_rest_dense(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is known before, and a mean budget promises more than these heads then get."""

    def expected_keys(
        self: HeadwiseConfig, resolved: HeadwiseConfig, n_tokens: int, reads_past: list[bool]
    ) -> float:
        return 0.0 if resolved.source == UNKNOWN else float(n_tokens)

    monkeypatch.setattr(HeadwiseConfig, "expected_keys", expected_keys)
    with LLM(path) as llm:
        stats = llm.generate(prompt_of(llm, 3000), ONE_TOKEN).stats
        assert stats.attention["table"] == TOO_SHORT
        assert stats.pairs_computed == stats.pairs_dense
        assert "profiled" in stats.note


def test_a_chat_is_judged_by_its_context(path: Path, table: str) -> None:
    attention = HeadwiseConfig(budget_table=table)
    with LLM(path, attention=attention, context_size=8192) as llm:
        stats = llm.generate(prompt_of(llm, 400), ONE_TOKEN, keep_cache=True).stats
        assert stats.attention["table"] == "file"


def test_a_cache_that_was_read_dense_is_read_again_once_it_is_long(
    path: Path, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payoff, "saves_time", lambda config, precision, n, keys, **_: n > 5000)
    with LLM(path, attention=HeadwiseConfig(budget_table=table)) as llm:
        prompt = prompt_of(llm, 8000)
        stats = llm.generate(prompt[:3000], ONE_TOKEN, keep_cache=True).stats
        assert stats.attention["table"] == TOO_SHORT
        stats = llm.generate(prompt, ONE_TOKEN, keep_cache=True).stats
        assert (stats.attention["table"], stats.cached_tokens) == ("file", 0)
        llm.forget()
        llm.generate(prompt[:4000], ONE_TOKEN, keep_cache=True)
        stats = llm.generate(prompt[:6000], ONE_TOKEN, keep_cache=True).stats
        assert (stats.attention["table"], stats.cached_tokens) == (TOO_SHORT, 4000)


def test_other_rules_are_run_as_they_are(path: Path) -> None:
    with LLM(path) as llm:
        for attention in (H2OConfig(), HeadwiseConfig(budget=64)):
            plan = RunPlan.of(llm.config, attention, PrefillConfig(), RuntimeConfig())
            assert choose_reading(plan, llm.model, 400) is plan
