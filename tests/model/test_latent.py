"""Latent attention in the core: its cache, its types, and rules that read parts of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeh2o import _core
from edgeh2o.attention.headwise import HeadwiseConfig
from edgeh2o.cli.main import main
from edgeh2o.engine.calibration import LayerProbe
from edgeh2o.errors import FormatError
from edgeh2o.runners.core_config import core_config
from edgeh2o.runners.native import NativeModelFile
from tests.model.model_pair import (
    CHUNK_SIZE,
    MAX_CONTEXT,
    ModelPair,
    layers_of,
    load_pair,
    prefill,
    random_tokens,
    relative_error,
    split,
)
from tests.models.tiny_file import read
from tests.reference.decoder import ReferenceDecoder
from tests.reference.decoder.latent import absorbed_values
from tests.tiny_models import TinyModelFactory

SHAPE = {"model_dim": 64, "n_heads": 4, "ffn_dim": 96, "kv_rank": 48, "rope_dim": 16}
ROW_DIM = 48 + 16
N_TOKENS = 3 * CHUNK_SIZE + 17
# Errors of the logits against the exact reference; a cache of f32 rounds nothing.
BOUNDS = {"f32": 2e-5, "f16": 2e-3, "q8_0": 4e-2}


@pytest.fixture(scope="module")
def pair(tiny_model: TinyModelFactory) -> ModelPair:
    """Without experts, whose choice is one of either or."""
    return load_pair(tiny_model, architecture="deepseek2", n_experts=0, **SHAPE)


@pytest.mark.parametrize("cache_type", BOUNDS)
def test_cache_types(pair: ModelPair, cache_type: str) -> None:
    tokens = random_tokens(N_TOKENS)
    run = pair.reference.start(layers_of("dense")[0])
    expected = run.prefill(tokens)
    session = pair.session(_core.dense_policy(), cache_type=cache_type)
    assert relative_error(prefill(session, tokens), expected) < BOUNDS[cache_type]
    decoded = [(session.decode(token), run.decode(token)) for token in (5, 6, 7)]
    actual, exact = (np.stack(logits) for logits in zip(*decoded, strict=True))
    assert relative_error(actual, exact) < BOUNDS[cache_type]


@pytest.mark.parametrize(
    ("cache_type", "row_bytes"), [("f16", 2 * ROW_DIM), ("f32", 4 * ROW_DIM), ("q8_0", 2 * 34)]
)
def test_one_row_per_token_is_kept(pair: ModelPair, cache_type: str, row_bytes: int) -> None:
    session = pair.session(_core.dense_policy(), cache_type=cache_type)
    assert session.memory_bytes["kv_cache"] == 2 * MAX_CONTEXT * row_bytes  # of two layers
    session.prefill(random_tokens(40), is_last=True)
    assert [rows.nbytes for rows in session.cached_rows()] == [40 * row_bytes] * 2


def test_keys_and_values_have_one_type(pair: ModelPair) -> None:
    with pytest.raises(ValueError, match=r"are the same rows: they have one cache type; use"):
        pair.session(_core.dense_policy(), cache_type="q8_0/f16")


@pytest.mark.parametrize(
    "options",
    [
        {"architecture": "minicpm3"},
        {"architecture": "deepseek2", "has_matrices_per_head": False, "q_rank": 0},
        {"architecture": "deepseek2", "n_experts": 0, "n_heads": 70, "model_dim": 32},
    ],
)
def test_both_layouts_and_many_heads(
    tiny_model: TinyModelFactory, options: dict[str, object]
) -> None:
    pair = load_pair(tiny_model, **{**SHAPE, **options})
    tokens = random_tokens(N_TOKENS)
    expected = pair.reference.start(layers_of("dense")[0]).prefill(tokens)
    session = pair.session(_core.dense_policy(), cache_type="f32")
    for lengths in ([N_TOKENS], [100, 1, N_TOKENS - 101]):
        assert relative_error(prefill(session, *split(tokens, lengths)), expected) < 2e-5


@pytest.mark.parametrize("is_new", [True, False])
def test_quantised_weights(tiny_model: TinyModelFactory, is_new: bool) -> None:
    """Products per head of quantised matrices; where keys are held as floats, of both kinds."""
    sizes = {"kv_rank": 64, "rope_dim": 32, "nope_dim": 32, "value_dim": 32, "q_rank": 32}
    options = {**SHAPE, **sizes, "has_matrices_per_head": is_new, "n_layers": 1}
    pair = load_pair(tiny_model, architecture="deepseek2", tensor_type="Q8_0", **options)
    tokens = random_tokens(60)
    exact = pair.reference.start(layers_of("dense")[0]).prefill(tokens)
    session = pair.session(_core.dense_policy(), cache_type="f32")
    assert relative_error(prefill(session, tokens), exact) < 0.02
    session.reset()
    session.prefill(tokens[:-1], is_last=True)
    assert relative_error(session.decode(int(tokens[-1])), exact[-1]) < 0.02


def test_heads_of_scales_by_256_need_no_width_of_256(tiny_model: TinyModelFactory) -> None:
    """A head's 256 values begin anywhere in a row: here 288 after those of the head before."""
    sizes = {"kv_rank": 256, "rope_dim": 32, "nope_dim": 256, "value_dim": 256, "q_rank": 256}
    shape = {"model_dim": 256, "n_heads": 4, "ffn_dim": 256, "n_experts": 0, "n_layers": 1}
    pair = load_pair(tiny_model, architecture="deepseek2", tensor_type="Q6_K", **sizes, **shape)
    tokens = random_tokens(60)
    exact = pair.reference.start(layers_of("dense")[0]).prefill(tokens)
    session = pair.session(_core.dense_policy(), cache_type="f32")
    logits = prefill(session, tokens)
    assert relative_error(logits, exact) < 0.03
    session.reset()
    session.prefill(tokens[:-1], is_last=True)
    np.testing.assert_array_equal(session.decode(int(tokens[-1])), logits[-1])


def test_a_batch_of_tokens_is_decoded_as_one_by_one(pair: ModelPair) -> None:
    session = pair.session(_core.dense_policy())
    session.prefill(random_tokens(90), is_last=True)
    tokens = np.array([5, 9, 11, 300], np.int32)
    together = session.decode_batch(tokens)
    session.rewind(90)
    alone = np.stack([session.decode(int(token)) for token in tokens])
    np.testing.assert_allclose(together, alone, atol=2e-4)


def test_results_of_a_long_past_are_merged_in_rounds(tiny_model: TinyModelFactory) -> None:
    """16 tokens and 10 ranges of keys have more results than are kept at once; one has not."""
    n, sizes = 2310, {"n_heads": 32, "kv_rank": 512, "n_layers": 1, "n_experts": 0}
    path = tiny_model(architecture="deepseek2", **{**SHAPE, **sizes})
    with NativeModelFile(path) as file:
        model = file.load()._core_model
    shape = {"chunk_size": 256, "batch_size": 512, "cache_type": "f16"}
    session = _core.Sequence(model, _core.dense_policy(), max_context=2400, **shape)
    tokens = random_tokens(n + 16)
    for first in range(0, n, 512):
        stop = min(first + 512, n)
        session.prefill(tokens[first:stop], is_last=stop == n)
    together = session.decode_batch(tokens[n:])
    session.rewind(n)
    alone = np.stack([session.decode(int(token)) for token in tokens[n:]])
    np.testing.assert_array_equal(together, alone)
    # Of 32,768 positions, 129 ranges, all results of 16 tokens would take 137 MB.
    short, long = (
        _core.Sequence.estimate_bytes(
            core_config(read(path)[0]), _core.dense_policy(), max_context=length, **shape, threads=1
        )["scratch"]
        for length in (2400, 32_768)
    )
    assert long - short < 2e6


# Of the rows that are chosen for so many positions.
PREFILL = {
    "h2o": lambda memory: _core.h2o_policy(memory // 2, memory - memory // 2),
    "headwise": lambda memory: _core.headwise_policy([memory] * 2, local=8, decode_from=0),
}
DECODE = {
    "quest": lambda n: _core.quest_policy(page_size=2, tokens=n, dense_layers=0),
    "rocketkv": lambda n: _core.rocketkv_policy(
        prompt_budget=n, window=8, kernel=3, topk=n // 4, topr=ROW_DIM
    ),
}


@pytest.mark.parametrize("policy", PREFILL)
def test_a_memory_for_everything_is_dense(pair: ModelPair, policy: str) -> None:
    tokens = random_tokens(N_TOKENS)
    expected = prefill(pair.session(_core.dense_policy(), cache_type="f32"), tokens)
    session = pair.session(PREFILL[policy](2 * MAX_CONTEXT), cache_type="f32")
    assert relative_error(prefill(session, tokens), expected) < 2e-5
    small = pair.session(PREFILL[policy](16), cache_type="f32")
    assert relative_error(prefill(small, tokens), expected) > 0.01


@pytest.mark.parametrize("policy", [*DECODE, "headwise"])
def test_rules_of_generated_tokens(pair: ModelPair, policy: str) -> None:
    """Rows that are key and value are chosen, scored and copied as both."""
    make = {**PREFILL, **DECODE}[policy]
    tokens = random_tokens(N_TOKENS)

    def decoded(rule: _core.SparsePolicy) -> np.ndarray:
        session = pair.session(rule, cache_type="f16")
        session.prefill(tokens, is_last=True)
        return np.stack([session.decode(token) for token in (5, 6, 7)])

    expected = decoded(_core.dense_policy())
    assert relative_error(decoded(make(2 * MAX_CONTEXT)), expected) < 1e-3
    few = [relative_error(decoded(make(n)), expected) for n in (24, 150)]
    assert 1e-3 < few[1] < few[0] < 1.5


@pytest.mark.parametrize(("n_directions", "tolerance"), [(0, 1e-4), (400, 0.2)])
def test_errors_of_rules_are_those_of_the_output(
    tiny_model: TinyModelFactory, n_directions: int, tolerance: float
) -> None:
    """What profiles and calibration measure, in the space of the residual stream."""
    n, first, budget, rng = 192, 64, 24, np.random.default_rng(0)
    path = tiny_model(architecture="minicpm3", n_layers=2, **SHAPE)
    with NativeModelFile(path) as file:
        model = file.load()
    rule = HeadwiseConfig(local=8)
    residual, q, rows = (
        rng.standard_normal((n, width)).astype(np.float32) for width in (64, 4 * ROW_DIM, ROW_DIM)
    )
    probe = LayerProbe(
        model,
        n,
        [budget],
        threads=1,
        first_query=first,
        rule=rule,
        chunk_size=CHUNK_SIZE,
        n_directions=n_directions,
    )
    probe(1, residual, q, rows, rows, None)

    def attended(memory: int | None) -> np.ndarray:
        policy = _core.headwise_policy(
            [memory] * 1,
            local=rule.local,
            sinks=rule.sinks,
            page_size=rule.landmark_size,
            spread=rule.landmark_spread,
        )
        sizes = {"chunk_size": CHUNK_SIZE, "batch_size": n, "max_context": n}
        attention = _core.ChunkedAttention(
            policy, 4, 1, ROW_DIM, **sizes, scale=model.config.attention_scale
        )
        k = rows.reshape(n, 1, ROW_DIM)
        return attention.run(0, q.reshape(n, 4, ROW_DIM), k, k, is_last=True)

    weights = ReferenceDecoder.from_gguf(path).weights
    difference = (attended(budget) - attended(None))[first:, :, :48].astype(np.float64)
    values = absorbed_values(difference.transpose(1, 0, 2), weights["blk.1.attn_v_b.weight"])
    out = values.transpose(1, 0, 2).reshape(n - first, -1) @ weights["blk.1.attn_output.weight"].T
    expected = np.sum(out**2) / np.sum(residual[first:].astype(np.float64) ** 2)
    assert probe.errors[1, 0] == pytest.approx(expected, rel=tolerance) and expected > 1e-3


def test_no_graph_is_written(
    tiny_model: TinyModelFactory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny_model(architecture="minicpm3", n_layers=2, **SHAPE)
    assert main(["export-onnx", str(path), str(tmp_path / "folder")]) == 1
    assert "multi-head latent attention cannot be written as ONNX" in capsys.readouterr().err


def test_sizes_that_the_core_refuses(tiny_model: TinyModelFactory) -> None:
    config, _ = read(tiny_model(architecture="minicpm3", n_layers=2, **SHAPE))
    assert config.latent is not None
    core_config(config)
    for change, problem in (
        ({"nope_dim": 0}, "heads of latent attention have 0"),
        ({"rope_dim": 8}, "one KV head, whose rows are keys and values of 56"),
    ):
        latent = replace(config.latent, **change)
        with pytest.raises(FormatError, match=problem):
            core_config(replace(config, latent=latent))
