"""Tiny models in the C++ decoder and in the reference, and how their logits are compared."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgeh2o import _core, _kernels, isa
from edgeh2o.runners.native import NativeModelFile
from tests.reference.decoder import AttentionLayer, DecoderRun, ReferenceDecoder
from tests.reference.dense import DenseLayer
from tests.reference.h2o import H2OLayer
from tests.tiny_models import TinyModelFactory

CHUNK_SIZE = 64
LOCAL, HEAVY = 12, 4
MAX_CONTEXT = 640
VOCAB_SIZE = 320
# Layers that differ in heads, KV heads and feed-forward width.
UNEQUAL: dict[str, object] = {
    "n_layers": 3,
    "model_dim": 64,
    "head_dim": 16,
    "n_heads": (4, 2, 4),
    "n_kv_heads": (2, 1, 4),
    "ffn_dim": (96, 64, 128),
}

Tokens = NDArray[np.int32]
Logits = NDArray[np.float32]


def random_tokens(n_tokens: int, *, seed: int = 0) -> Tokens:
    """Token ids [n_tokens] of the tiny vocabulary, without its control tokens."""
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, size=n_tokens).astype(np.int32)


def relative_error(logits: NDArray[np.floating], expected: NDArray[np.floating]) -> float:
    """Root mean square of the difference over the standard deviation of the expected logits."""
    difference = np.asarray(logits, np.float64) - expected
    return float(np.sqrt(np.mean(difference**2)) / np.std(expected))


@dataclass(frozen=True)
class ModelPair:
    """The same file in the C++ decoder and in the float64 reference."""

    path: Path
    core: _core.Model

    @functools.cached_property
    def reference(self) -> ReferenceDecoder:
        """Read when asked for: that takes longer than the core's, and many tests do without."""
        return ReferenceDecoder.from_gguf(self.path)

    def session(
        self,
        policy: _core.SparsePolicy,
        *,
        batch_size: int = MAX_CONTEXT,
        chunk_size: int = CHUNK_SIZE,
        cache_type: str = "f16",
        all_rows: bool = True,
    ) -> _core.Sequence:
        """A session of the C++ decoder for prompts of up to MAX_CONTEXT tokens."""
        return _core.Sequence(
            self.core,
            policy,
            max_context=MAX_CONTEXT,
            batch_size=batch_size,
            chunk_size=chunk_size,
            cache_type=cache_type,
            all_rows=all_rows,
        )

    def as_computed(self, make_layer: Callable[[], AttentionLayer]) -> DecoderRun:
        """Reference run with the two roundings of the core: 8-bit activations, f16 cache."""
        scale_block_of = functools.partial(_kernels.scale_block, isa.active())
        return self.reference.start(make_layer, scale_block_of=scale_block_of, cache_type="f16")


def load_pair(tiny_model: TinyModelFactory, **options: object) -> ModelPair:
    """The tiny model, of two layers if not said otherwise; read once per file."""
    return _load(tiny_model(**{"n_layers": 2, **options}))


@functools.cache
def _load(path: Path) -> ModelPair:
    with NativeModelFile(path) as model_file:
        core = model_file.load()._core_model
    return ModelPair(path, core)


def prefill(session: _core.Sequence, *batches: Tokens) -> Logits:
    """Logits [n_tokens, vocab_size] of a prompt given as logical batches, after a reset."""
    session.reset()
    parts = []
    for batch_idx, batch in enumerate(batches):
        session.prefill(batch, is_last=batch_idx == len(batches) - 1)
        parts.append(session.row_logits(0, len(batch)))
    return np.concatenate(parts)


def split(tokens: Tokens, lengths: Sequence[int]) -> list[Tokens]:
    """Consecutive parts of tokens with the given lengths."""
    return np.split(tokens, np.cumsum(lengths)[:-1])


def make_h2o(**options: float | None) -> H2OLayer:
    """Reference attention of one layer with the sizes of these tests."""
    return H2OLayer(chunk_size=CHUNK_SIZE, local=LOCAL, heavy=HEAVY, **options)


def decisive_prompt(pair: ModelPair, n_tokens: int, *, min_margin: float = 0.02) -> Tokens:
    """Random tokens for which no choice of a heavy hitter is a near tie in the reference.

    The scores of the core differ from the reference's by rounding, a few thousandths, so a
    near tie could be decided either way and the logits could not be compared.
    """
    for seed in range(50):
        tokens = random_tokens(n_tokens, seed=seed)
        run = pair.as_computed(make_h2o)
        run.prefill(tokens)
        scored = [layer for layer in run.layers if isinstance(layer, H2OLayer)]
        if min(chunk.margins.min() for layer in scored for chunk in layer.chunks) > min_margin:
            return tokens
    raise AssertionError(f"no prompt of {n_tokens} tokens decides every choice clearly")


def clear_prompt(pair: ModelPair, n_tokens: int, *, min_margin: float = 2e-5) -> Tokens:
    """Random tokens for which no choice of an indexer is a near tie in the reference."""
    for seed in range(50):
        tokens = random_tokens(n_tokens, seed=seed)
        if not pair.reference.config.index_top_k:
            return tokens
        run = pair.reference.start(DenseLayer)
        run.prefill(tokens)
        if min(run.margins, default=np.inf) > min_margin:
            return tokens
    raise AssertionError(f"no prompt of {n_tokens} tokens decides every choice clearly")


def layers_of(
    attention: str,
) -> tuple[Callable[[], AttentionLayer], Callable[[], _core.SparsePolicy]]:
    """Makers of the reference layer and of the C++ policy, of "dense" or "h2o", for these tests."""
    if attention == "dense":
        return DenseLayer, _core.dense_policy
    return make_h2o, lambda: _core.h2o_policy(LOCAL, HEAVY)


def decode_noting_reads(
    pair: ModelPair, tokens: Tokens, n: int
) -> tuple[DecoderRun, list[NDArray[np.int32]]]:
    """Token ``n`` behind a prompt of the others: the reference's run, what each KV head read."""
    run = pair.reference.start(DenseLayer)
    run.prefill(tokens[:n])
    run.decode(int(tokens[n]))
    session = pair.session(_core.dense_policy(), cache_type="f32")
    session.prefill(tokens[:n], is_last=True)
    session.note_reads(True)
    session.decode(int(tokens[n]))
    return run, [np.array(read, np.int32) for read in session.reads]
