"""Models whose layers differ in heads, KV heads and feed-forward width, from the file to the flags.

test_architectures.py and test_session_state.py hold them against the reference in other ways.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeh2o import LLM, HeadwiseConfig, SamplingParams, _core
from edgeh2o.cli.main import main
from edgeh2o.engine.profile import PROFILED_LENGTH, profile_prompt
from edgeh2o.runners import native
from edgeh2o.runners.base import SessionShape
from edgeh2o.runners.core_config import core_config
from edgeh2o.runners.native import NativeModelFile
from tests.model.model_pair import (
    CHUNK_SIZE,
    UNEQUAL,
    ModelPair,
    layers_of,
    load_pair,
    make_h2o,
    prefill,
    random_tokens,
    relative_error,
    split,
)
from tests.reference.decoder import AttentionLayer
from tests.reference.dense import DenseLayer
from tests.reference.headwise import HeadwiseLayer
from tests.tiny_models import TinyModelFactory

# By layer, of as many KV heads as UNEQUAL has.
BUDGETS = ((None, 8), (16,), (12, None, 24, 40))
HEADWISE = {"local": 4, "sinks": 2, "page_size": 16}
ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1)


def headwise_layers(pair: ModelPair) -> Callable[..., AttentionLayer]:
    """Makes the layers without a window one after the other, each with its own budgets."""
    windows = pair.reference.config.windows
    budgets = iter([own for own, window in zip(BUDGETS, windows, strict=True) if window is None])
    return lambda **options: HeadwiseLayer(
        chunk_size=CHUNK_SIZE, budgets=next(budgets), **HEADWISE, **options
    )


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "qwen3"])
def test_headwise_budgets_go_to_the_heads_of_their_layer(
    tiny_model: TinyModelFactory, architecture: str
) -> None:
    windows = {"sliding_window": 24} if architecture == "gemma2" else {}
    pair = load_pair(tiny_model, **UNEQUAL, architecture=architecture, **windows)
    policy = _core.headwise_policy([b for own in BUDGETS for b in own], **HEADWISE)
    lengths = [2 * CHUNK_SIZE, CHUNK_SIZE + 40]
    for seed in range(20):
        tokens = random_tokens(sum(lengths) + 3, seed=seed)
        run = pair.reference.start(headwise_layers(pair))
        expected = [run.prefill(part) for part in split(tokens[:-3], lengths)]
        chosen = [layer.chunks for layer in run.layers if isinstance(layer, HeadwiseLayer)]
        if min(chunk.margins.min() for chunks in chosen for chunk in chunks) > 1e-4:
            break  # no choice of a heavy hitter is a near tie
    else:
        raise AssertionError("no prompt decides every choice clearly")
    session = pair.session(policy, cache_type="f32")
    session.reset()
    for part, logits in zip(split(tokens[:-3], lengths), expected, strict=True):
        session.prefill(part, is_last=False)
        assert relative_error(session.row_logits(0, len(part)), logits) < 2e-5
    for token in tokens[-3:].tolist():
        assert relative_error(session.decode(token), run.decode(token)) < 2e-5


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, object]:
    """Options of a tiny model of one to three layers, each with sizes of its own."""
    n_layers = draw(st.integers(1, 3))

    def per_layer(*choices: int) -> tuple[int, ...]:
        return tuple(draw(st.sampled_from(choices)) for _ in range(n_layers))

    kv_heads = per_layer(1, 2, 3)
    return {
        "n_layers": n_layers,
        "architecture": draw(st.sampled_from(["llama", "gemma2", "olmo2", "phi3"])),
        "sliding_window": draw(st.sampled_from([7, CHUNK_SIZE + 9])),
        "model_dim": 32,
        "head_dim": 8,
        "n_kv_heads": kv_heads,
        "n_heads": tuple(n * m for n, m in zip(kv_heads, per_layer(1, 2, 3), strict=True)),
        "ffn_dim": per_layer(8, 24, 40),
    }


@given(options=shapes())
@settings(max_examples=15, deadline=None)
def test_any_sizes_give_the_logits_of_the_reference(
    tiny_model: TinyModelFactory, options: dict[str, object]
) -> None:
    pair = load_pair(tiny_model, **options)
    tokens = random_tokens(CHUNK_SIZE + 20)
    make_layer, make_policy = layers_of("dense")
    logits = prefill(pair.session(make_policy(), cache_type="f32"), tokens)
    assert relative_error(logits, pair.reference.start(make_layer).prefill(tokens)) < 2e-5


@pytest.mark.parametrize("cache_type", ["f16", "f32"])
def test_the_estimate_counts_the_kv_heads_of_every_layer(
    tiny_model: TinyModelFactory, cache_type: str
) -> None:
    with NativeModelFile(tiny_model(**UNEQUAL)) as file:
        model = file.load()
    shape = SessionShape(max_context=96, batch_size=32, chunk_size=16, cache_type=cache_type)
    estimate = model.estimate_session_bytes(HeadwiseConfig(), shape)
    assert model.start_session(HeadwiseConfig(), shape).memory_bytes == estimate
    value_bytes = {"f16": 2, "f32": 4}[cache_type]
    assert estimate["kv_cache"] == 96 * 2 * 7 * 16 * value_bytes


def test_heads_get_the_same_budget_and_no_profile(
    tiny_model: TinyModelFactory, tmp_path: Path
) -> None:
    path, saved = tiny_model(**UNEQUAL, context_length=8192), tmp_path / "session"
    tokens = random_tokens(PROFILED_LENGTH)
    with LLM(path, attention=HeadwiseConfig(budget=300)) as llm:
        assert llm.config.n_slots == 7
        result = llm.generate(tokens, ONE_TOKEN, keep_cache=True)
        stats = result.stats
        assert (stats.attention["table"], stats.attention["budget"]) == ("uniform", 300)
        llm.save_session(saved)
        more = [*tokens.tolist(), *result.token_ids, 5]
        expected = llm.generate(more, ONE_TOKEN, keep_cache=True).token_ids
    with LLM(path, attention=HeadwiseConfig(budget=300)) as llm:
        llm.load_session(saved)
        assert llm.generate(more, ONE_TOKEN, keep_cache=True).token_ids == expected


def test_layers_of_equal_kv_heads_can_be_profiled(tiny_model: TinyModelFactory) -> None:
    path = tiny_model(**{**UNEQUAL, "n_kv_heads": 2}, context_length=8192)
    with LLM(path) as llm:
        assert llm.model.shows_attention
        table = profile_prompt(llm.model, random_tokens(PROFILED_LENGTH), threads=2)
    assert table is not None
    assert np.shape(table.errors) == (6, len(table.levels))
    assert np.all(np.array(table.errors)[:, 0] > 0)


@pytest.mark.parametrize(
    ("verb", "message"),
    [
        (["calibrate", "{model}"], "calibration needs layers of equal numbers of KV heads"),
        (["heatmap", "{model}", "-f", "{text}", "--ctx", "1500"], "a heatmap needs layers of"),
        (["export-onnx", "{model}", "{folder}"], "run the GGUF file itself"),
        (["run", "{model}", "-p", "x", "--max-loss", "1"], "a budget table, which needs layers of"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_wants_equal_layers_says_so(
    tiny_model: TinyModelFactory,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    verb: list[str],
    message: str,
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the thing is that the art is there " * 200)
    names = {"model": tiny_model(**UNEQUAL), "text": text, "folder": tmp_path / "new"}
    assert main([word.format(**names) for word in verb]) in (1, 2)
    errors = capsys.readouterr().err
    assert message in errors and "Traceback" not in errors


def test_inspect_shows_the_memory_of_a_session(
    tiny_model: TinyModelFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(tiny_model(**UNEQUAL))
    assert main(["inspect", model, "--ctx-size", "512", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["memory_bytes"]["kv_cache"] == 512 * 2 * 7 * 16 * 2


def test_windows_scales_and_caps_of_a_layer_are_its_own(
    tiny_model: TinyModelFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file says so yet: the core's own configuration does."""
    path = tiny_model(**{**UNEQUAL, "n_layers": 3})
    attention = [
        {"scale": 0.25, "soft_cap": None, "window": 24},
        {"scale": 0.1, "soft_cap": 2.0, "window": None},
        {"scale": 0.4, "soft_cap": 5.0, "window": CHUNK_SIZE + 9},
    ]
    original = _core.DecoderConfig

    def make_config(*, layers: list[dict[str, object]], **fields: object) -> _core.DecoderConfig:
        for layer, own in zip(layers, attention, strict=True):
            layer |= {
                "attention_scale": own["scale"],
                "attention_soft_cap": own["soft_cap"] or 0.0,
                "window": own["window"] or 0,
            }
        return original(layers=layers, **fields)

    monkeypatch.setattr(_core, "DecoderConfig", make_config)
    monkeypatch.setattr(native, "core_config", core_config.__wrapped__)  # which remembers
    with NativeModelFile(path) as file:
        pair = ModelPair(path, file.load()._core_model)
    tokens = random_tokens(2 * CHUNK_SIZE + 20)
    for name in ("dense", "h2o"):
        options = iter(attention)

        def make_layer(**_: object) -> AttentionLayer:
            own = next(options)  # noqa: B023
            if name == "dense" or own["window"]:  # noqa: B023
                return DenseLayer(**own)
            return make_h2o(scale=own["scale"], soft_cap=own["soft_cap"])

        run = pair.reference.start(make_layer)
        session = pair.session(layers_of(name)[1](), cache_type="f32")
        expected = run.prefill(tokens)
        assert relative_error(prefill(session, tokens), expected) < 2e-5
        assert relative_error(session.decode(7), run.decode(7)) < 2e-5
