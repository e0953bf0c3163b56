"""The rest of a prompt goes on otherwise: in other products, densely, without a guard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgeh2o import LLM, DenseConfig, HeadwiseConfig, PrefillConfig, _core
from edgeh2o.attention.base import SparseAttentionConfig
from edgeh2o.runners.base import SessionShape
from edgeh2o.runners.native import NativeModelFile
from tests.model.model_pair import random_tokens
from tests.tiny_models import TinyModelFactory, with_vectors

CONTEXT, CHUNK, N_FIRST = 384, 64, 128
pytestmark = pytest.mark.skipif(
    "int8" not in _core.attention_precisions(), reason="no int8 products on this machine"
)


@pytest.fixture(scope="module")
def path(tiny_model: TinyModelFactory) -> Path:
    return tiny_model(n_layers=3, n_heads=4, n_kv_heads=2, head_dim=16, context_length=512, seed=3)


@pytest.fixture
def llm(path: Path) -> Any:
    prefill = PrefillConfig(batch_size=N_FIRST, chunk_size=CHUNK)
    with LLM(path, prefill=prefill, attention_precision="f32", threads=2) as loaded:
        yield loaded


def _learning(llm: LLM) -> HeadwiseConfig:
    """Budgets that hold all of the first call, of query heads, as a prompt that is profiled."""
    n = llm.config.n_layers * llm.config.n_heads
    return HeadwiseConfig(budgets=(N_FIRST,) * n, by_query_head=True, landmark_size=16, local=32)


def _read(runner: Any, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    logits = None
    for first in range(0, len(tokens), N_FIRST):
        part = tokens[first : first + N_FIRST]
        logits = runner.prefill(part, is_last=first + N_FIRST >= len(tokens))
    assert logits is not None
    return logits.copy()


def _with_rest(
    llm: LLM,
    attention: SparseAttentionConfig,
    tokens: NDArray[np.int32],
    precision: str,
    *,
    reads_all: bool,
) -> tuple[Any, NDArray[np.float32]]:
    runner: Any = llm.start_runner(CONTEXT, attention=attention)
    runner.prefill(tokens[:N_FIRST], is_last=False)
    runner.read_rest(precision, reads_all=reads_all)
    return runner, _read(runner, tokens[N_FIRST:])


@pytest.mark.parametrize("precision", ["f32", "int8"])
def test_a_rest_that_reads_everything_is_that_of_a_dense_prompt(llm: LLM, precision: str) -> None:
    """Query heads with memory sets of their own share what they read then; nothing is guarded."""
    tokens = random_tokens(CONTEXT - 20)
    runner, logits = _with_rest(llm, _learning(llm), tokens, precision, reads_all=True)
    dense, expected = _with_rest(llm, DenseConfig(), tokens, precision, reads_all=True)
    close = {"atol": 1e-3, "rtol": 0}  # the first call has other sums, for the rule's scores
    np.testing.assert_allclose(logits, expected, **close)
    assert runner.pairs_computed == dense.pairs_computed == dense.pairs_dense
    assert runner.n_dense_reads == 0
    exact = _read(llm.start_runner(CONTEXT, attention=DenseConfig()), tokens)
    assert (precision == "int8") == (np.abs(logits - exact).max() > 0.01)
    np.testing.assert_allclose(logits, exact, atol=0.05 * np.abs(exact).max())
    np.testing.assert_allclose(runner.decode(5), dense.decode(5), **close)


def test_a_sparse_rest_stays_sparse(llm: LLM) -> None:
    """With the policy's budgets, in other products."""
    tokens = random_tokens(CONTEXT - 20)
    attention = _learning(llm)
    sparse = HeadwiseConfig(budgets=tuple(48 for _ in attention.budgets or ()), by_query_head=True)
    runner, logits = _with_rest(llm, sparse, tokens, "int8", reads_all=False)
    exact, expected = _with_rest(llm, sparse, tokens, "f32", reads_all=False)
    assert runner.pairs_computed == exact.pairs_computed < exact.pairs_dense
    assert not np.array_equal(logits, expected)
    np.testing.assert_allclose(logits, expected, atol=0.05 * np.abs(expected).max())


def test_it_goes_back_and_on(llm: LLM) -> None:
    """A mark that lies in the rest is gone on from as it was; eviction may be allowed beside."""
    tokens = random_tokens(CONTEXT - 60)
    _, logits = _with_rest(llm, _learning(llm), tokens, "int8", reads_all=True)
    other: Any = llm.start_runner(CONTEXT, attention=_learning(llm))
    other.allow_eviction(True)
    other.prefill(tokens[:N_FIRST], is_last=False)
    other.read_rest("int8", reads_all=True)
    other.allow_eviction(False)
    middle = 2 * N_FIRST
    other.prefill(tokens[N_FIRST:middle], is_last=False)
    assert other.mark()
    for _ in range(2):
        np.testing.assert_array_equal(_read(other, tokens[middle:]), logits)
        other.rewind(middle)


def test_layers_with_large_keys_stay_exact(tiny_model: TinyModelFactory, tmp_path: Path) -> None:
    """Those of a sequence that was begun so, whatever shares their shape."""
    head_dim = 32
    q, k = np.zeros((8, head_dim), "f4"), np.zeros((2, head_dim), "f4")
    q[4:, [1, 17]] = k[1, [1, 17]] = 60.0
    path = with_vectors(
        tiny_model(architecture="qwen2", n_layers=2, context_length=512),
        tmp_path / "m.gguf",
        {"blk.1.attn_q.bias": q.ravel(), "blk.1.attn_k.bias": k.ravel()},
    )
    shape = {
        "max_context": CONTEXT,
        "batch_size": N_FIRST,
        "chunk_size": CHUNK,
        "cache_type": "f16",
    }
    with NativeModelFile(path) as file:
        assert [layer.has_large_keys for layer in file.config.layers] == [False, True]
        model = file.load()
    results = {}
    for begun, rest in (("int8", None), ("f32", "int8"), ("f32", None), ("int8", "f32")):
        runner: Any = model.start_session(DenseConfig(), SessionShape(precision=begun, **shape))
        if rest is not None:
            runner.read_rest(rest, reads_all=True)
        results[begun, rest] = _read(runner, np.arange(3, 203, dtype=np.int32) % 200 + 3)
    np.testing.assert_array_equal(results["f32", "int8"], results["int8", None])
    np.testing.assert_array_equal(results["int8", "f32"], results["f32", None])
    assert not np.array_equal(results["int8", None], results["f32", None])


def test_what_cannot_be_is_refused(llm: LLM) -> None:
    tokens = random_tokens(CONTEXT - 20)
    runner: Any = llm.start_runner(CONTEXT, attention=DenseConfig())
    with pytest.raises(ValueError, match="'int4' is not f32, bf16, f16, int8 or int16"):
        runner.read_rest("int4", reads_all=True)

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runner.prefill(tokens[:N_FIRST], is_last=False, on_layer=interrupt)
    with pytest.raises(ValueError, match="the last call was interrupted"):
        runner.read_rest("int8", reads_all=True)
    runner.reset()
    expected = _read(llm.start_runner(CONTEXT, attention=DenseConfig()), tokens)
    np.testing.assert_array_equal(_read(runner, tokens), expected)
