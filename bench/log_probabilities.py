"""Log-probabilities that llama-perplexity saves, and how far another set of logits is from them.

``llama-perplexity --save-all-logits`` writes little-endian: the magic ``_logits_``, int32 context
size, vocabulary size and number of windows, int32 tokens [n_windows, context], then one row per
scored position. A row holds float32 scale and minimum and one uint16 per token, padded to an even
number: log-probability = scale * value + minimum. What lies more than 16 nats below the row's
maximum is stored as the minimum. A window scores the positions from its middle to its last but
one, each with all tokens of the window before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from .errors import LlamaCppError

Float = TypeVar("Float", bound=np.floating)

_MAGIC = b"_logits_"
CLAMP_NATS = 16.0


@dataclass(frozen=True, slots=True, eq=False)
class WindowLogProbabilities:
    """``tokens`` int32 [n_windows, context]; ``rows`` one record per window and scored position."""

    tokens: NDArray[np.int32]
    rows: NDArray[np.void]

    @property
    def n_windows(self) -> int:
        """Number of windows."""
        return len(self.tokens)

    @property
    def first_scored(self) -> int:
        """Position inside a window whose next token is the first that is scored."""
        return len(self.tokens[0]) // 2

    def next_tokens(self, window: int) -> NDArray[np.int32]:
        """The true next tokens of the scored positions, [n_scored]."""
        return self.tokens[window, self.first_scored + 1 :]

    def log_probabilities(self, window: int) -> NDArray[np.float32]:
        """Log-probabilities at the scored positions, [n_scored, vocab], rounded as saved."""
        rows = self.rows[window]
        values: NDArray[np.float32] = rows["values"].astype(np.float32)
        values *= rows["scale"][:, None]
        values += rows["minimum"][:, None]
        return values


def read_log_probabilities(path: Path) -> WindowLogProbabilities:
    """The whole file in memory, 2 bytes per scored position and vocabulary entry.

    Raises LlamaCppError for a file of another kind or length.
    """
    data = path.read_bytes()
    if not data.startswith(_MAGIC) or len(data) < 20:
        raise LlamaCppError(f"{path} holds no log-probabilities of llama-perplexity")
    context, vocab_size, n_windows = np.frombuffer(data, "<i4", 3, len(_MAGIC)).tolist()
    n_scored = context - 1 - context // 2
    row = np.dtype(
        {
            "names": ["scale", "minimum", "values"],
            "formats": ["<f4", "<f4", ("<u2", (vocab_size,))],
            "offsets": [0, 4, 8],
            "itemsize": 8 + 2 * (vocab_size + vocab_size % 2),
        }
    )
    tokens_at = len(_MAGIC) + 12
    rows_at = tokens_at + 4 * n_windows * context
    expected = rows_at + n_windows * n_scored * row.itemsize
    if len(data) != expected:
        raise LlamaCppError(f"{path} has {len(data)} bytes, its header asks for {expected}")
    tokens = np.frombuffer(data, "<i4", n_windows * context, tokens_at)
    rows = np.frombuffer(data, row, n_windows * n_scored, rows_at)
    return WindowLogProbabilities(
        tokens.reshape(n_windows, context), rows.reshape(n_windows, n_scored)
    )


@dataclass(frozen=True, slots=True, eq=False)
class Agreement:
    """How two models agree, per scored position: arrays of one length."""

    kl_divergence: NDArray[np.float64]
    reference_log_probability: NDArray[np.float64]
    log_probability: NDArray[np.float64]
    is_same_top: NDArray[np.bool_]

    @property
    def differences(self) -> NDArray[np.float64]:
        """|difference| of the log-probabilities of the true tokens, in nats."""
        return np.abs(self.log_probability - self.reference_log_probability)

    @property
    def mean_kl(self) -> float:
        """Mean KL divergence in nats."""
        return float(self.kl_divergence.mean())

    @property
    def mean_difference(self) -> float:
        """Mean of ``differences``."""
        return float(self.differences.mean())

    @property
    def top_agreement(self) -> float:
        """Share of the positions where both have the same most likely token."""
        return float(self.is_same_top.mean())

    @property
    def reference_perplexity(self) -> float:
        """Perplexity of the reference over the scored positions."""
        return float(np.exp(-self.reference_log_probability.mean()))

    @property
    def perplexity(self) -> float:
        """Perplexity of the other model over the scored positions."""
        return float(np.exp(-self.log_probability.mean()))


def compare(
    reference: NDArray[np.float32], logits: NDArray[np.float32], next_tokens: NDArray[np.int32]
) -> Agreement:
    """Compares saved log-probabilities with logits, both [n, vocab]; ``next_tokens`` is [n].

    The logits are clamped as the saved ones are. For the KL divergence (reference || logits, in
    nats) both are normalised again, which leaves about 1e-8 as the effect of the rounding.
    """
    other = clamp(log_softmax(logits.astype(np.float64)))
    known = reference.astype(np.float64)
    index = np.arange(len(next_tokens))
    known_normalised, other_normalised = log_softmax(known), log_softmax(other)
    kl_divergence = (np.exp(known_normalised) * (known_normalised - other_normalised)).sum(axis=1)
    return Agreement(
        kl_divergence=kl_divergence,
        reference_log_probability=known[index, next_tokens],
        log_probability=other[index, next_tokens],
        is_same_top=known.argmax(axis=1) == other.argmax(axis=1),
    )


def join(parts: Sequence[Agreement]) -> Agreement:
    """One Agreement over the positions of all ``parts``."""
    names = [item.name for item in fields(Agreement)]
    return Agreement(*(np.concatenate([getattr(p, name) for p in parts]) for name in names))


def log_softmax(logits: NDArray[Float]) -> NDArray[Float]:
    """Natural logarithm of the softmax of every row."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    normalised: NDArray[Float] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return normalised


def clamp(log_probabilities: NDArray[np.float64]) -> NDArray[np.float64]:
    """Raises what is more than ``CLAMP_NATS`` below its row's maximum to that limit."""
    limit = log_probabilities.max(axis=1, keepdims=True) - CLAMP_NATS
    clamped: NDArray[np.float64] = np.maximum(log_probabilities, limit)
    return clamped
