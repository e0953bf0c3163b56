"""A runner, a model and a tokenizer whose behaviour is known exactly."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeh2o.attention.base import SparseAttentionConfig
from edgeh2o.attention.dense import DenseConfig
from edgeh2o.config import PrefillConfig, RuntimeConfig
from edgeh2o.engine.plan import RunPlan
from edgeh2o.model_config import ModelConfig
from edgeh2o.runners.base import OnLayer, SessionShape

N_LAYERS = 2


class ScriptedRunner:
    """Gives the tokens of ``script`` a logit of 10 in turn, all others 1; repeats the last.

    ``calls`` records ("prefill", tokens, is_last) and ("decode", token).
    """

    max_decode_tokens = 1
    decode_bytes = 0

    def __init__(
        self,
        script: Sequence[int],
        *,
        vocab_size: int = 64,
        max_context: int = 100,
        batch_size: int = 8,
        chunk_size: int = 4,
        on_decode: Callable[[int], None] | None = None,
    ) -> None:
        self.script = list(script)
        self.vocab_size = vocab_size
        self.max_context = max_context
        self.batch_size = batch_size
        self.chunk_size = chunk_size
        self.on_decode = on_decode
        self.position = 0
        self.prefill_end = 0
        self.prompt_logits: NDArray[np.float32] | None = None
        self.n_resets = 0
        self.calls: list[tuple[Any, ...]] = []
        self._n_logits = 0

    @property
    def pairs_dense(self) -> int:
        return self.position * (self.position + 1) // 2

    @property
    def pairs_computed(self) -> int:
        return self.position

    @property
    def error_sums(self) -> NDArray[np.float64]:
        return np.zeros((N_LAYERS, 2))

    @property
    def n_dense_reads(self) -> int:
        return 0

    @property
    def memory_bytes(self) -> Mapping[str, int]:
        return {"kv_cache": 4 * self.max_context}

    def prefill(
        self,
        tokens: NDArray[np.int32],
        *,
        is_last: bool,
        stays_open: bool = False,
        on_layer: OnLayer | None = None,
    ) -> NDArray[np.float32] | None:
        assert tokens.dtype == np.int32
        assert 0 < len(tokens) <= self.batch_size
        self.calls.append(("prefill", tokens.tolist(), is_last))
        self.position += len(tokens)
        for layer in range(N_LAYERS):
            if on_layer is not None:
                on_layer(layer + 1, N_LAYERS)
        return self._next_logits() if is_last else None

    def decode(self, token: int) -> NDArray[np.float32]:
        assert self.position < self.max_context
        self.calls.append(("decode", token))
        if self.on_decode is not None:
            self.on_decode(token)
        self.position += 1
        return self._next_logits()

    def reset(self) -> None:
        self.position = 0
        self.n_resets += 1

    def _next_logits(self) -> NDArray[np.float32]:
        token = self.script[min(self._n_logits, len(self.script) - 1)]
        self._n_logits += 1
        logits = np.ones(self.vocab_size, dtype=np.float32)
        logits[token] = 10.0
        return logits


CONFIG = ModelConfig(
    architecture="llama",
    n_layers=N_LAYERS,
    n_heads=2,
    n_kv_heads=1,
    head_dim=4,
    vocab_size=64,
    context_length=8192,
    attention_scale=0.5,
)


class FakeModel:
    """A model whose sessions cost 100 bytes a position and 10 bytes a batch token."""

    weight_bytes = 0

    def __init__(self) -> None:
        self.started: list[SessionShape] = []

    def estimate_session_bytes(self, attention: object, shape: SessionShape) -> Mapping[str, int]:
        return {"kv_cache": 100 * shape.max_context, "activations": 10 * shape.batch_size}

    def start_session(self, attention: object, shape: SessionShape) -> ScriptedRunner:
        self.started.append(shape)
        return ScriptedRunner(
            [0],
            max_context=shape.max_context,
            batch_size=shape.batch_size,
            chunk_size=shape.chunk_size,
        )


class PieceTokenizer:
    """Token i is the bytes ``pieces[i]``; ids in ``eog_ids`` end a generation."""

    def __init__(self, pieces: Sequence[bytes], *, eog_ids: Sequence[int] = ()) -> None:
        self.pieces = list(pieces)
        self.eog_ids = frozenset(eog_ids)

    def decoder(self, *, skip_special: bool = False, continues: bool = False) -> PieceDecoder:
        return PieceDecoder(self.pieces)


class PieceDecoder:
    """Passes on complete UTF-8 only."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        self._pending = b""

    def push(self, token_id: int) -> str:
        self._pending += self._pieces[token_id]
        try:
            text = self._pending.decode("utf-8")
        except UnicodeDecodeError:
            return ""
        self._pending = b""
        return text

    def finish(self) -> str:
        pending, self._pending = self._pending, b""
        return pending.decode("utf-8", errors="replace")


def make_plan(
    attention: SparseAttentionConfig | None = None, *, trained: int = 8192, **runtime: Any
) -> RunPlan:
    """Of a model that was trained on so many positions, by default with dense attention."""
    config = replace(CONFIG, context_length=trained)
    return RunPlan.of(config, attention or DenseConfig(), PrefillConfig(), RuntimeConfig(**runtime))
