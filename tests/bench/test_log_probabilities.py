"""The file of llama-perplexity is read as its sources write it, and distances are right."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from bench.errors import LlamaCppError
from bench.log_probabilities import compare, join, log_softmax, read_log_probabilities

CONTEXT = 6
VOCAB = 5
TOKENS = [[0, 1, 2, 3, 4, 0], [4, 3, 2, 1, 0, 2]]
# Positions 3 and 4 of each window predict positions 4 and 5.
N_SCORED = 2


def save(path: Path, logits: NDArray[np.float64]) -> None:
    """Writes logits [window, scored, vocab] one value at a time, as the format says."""
    data = b"_logits_" + struct.pack("<iii", CONTEXT, VOCAB, len(TOKENS))
    for window in TOKENS:
        data += struct.pack(f"<{CONTEXT}i", *window)
    for row in logits.reshape(-1, VOCAB):
        top = row.max()
        low = max(row.min(), top - 16)
        log_sum = np.log(np.exp(row - top).sum())
        scale = (top - low) / 65535
        data += struct.pack("<ff", scale, low - top - log_sum)
        values = [round((value - low) / scale) if value > low else 0 for value in row]
        data += struct.pack(f"<{VOCAB}H", *values) + bytes(2)
    path.write_bytes(data)


@pytest.fixture
def logits() -> NDArray[np.float64]:
    return np.random.default_rng(7).normal(scale=3, size=(len(TOKENS), N_SCORED, VOCAB))


def test_saved_values_come_back(tmp_path: Path, logits: NDArray[np.float64]) -> None:
    path = tmp_path / "saved.bin"
    save(path, logits)
    saved = read_log_probabilities(path)
    assert saved.tokens.tolist() == TOKENS
    assert (saved.n_windows, saved.first_scored) == (2, 3)
    assert saved.next_tokens(0).tolist() == [4, 0]
    assert saved.next_tokens(1).tolist() == [0, 2]
    for window in range(2):
        # Half a step of the 16-bit values, for a range of at most 16 nats, plus float32 rounding.
        np.testing.assert_allclose(
            saved.log_probabilities(window), log_softmax(logits[window]), atol=16 / 65535 / 2 + 1e-5
        )


def test_a_window_scores_what_llama_perplexity_scores(
    tmp_path: Path, logits: NDArray[np.float64]
) -> None:
    """With all logits of a window at hand, [first_scored : -1] are the rows of the file."""
    path = tmp_path / "saved.bin"
    save(path, logits)
    saved = read_log_probabilities(path)
    window_logits = np.zeros((CONTEXT, VOCAB), np.float32)
    window_logits[3:5] = logits[0]
    scored = window_logits[saved.first_scored : -1]
    agreement = compare(saved.log_probabilities(0), scored, saved.next_tokens(0))
    assert agreement.kl_divergence.shape == (N_SCORED,)
    assert agreement.kl_divergence.max() < 1e-7
    assert agreement.differences.max() < 2e-4
    assert agreement.top_agreement == 1


@pytest.mark.parametrize("n_bytes", [0, 8, 19, 40, -1])
def test_a_file_of_the_wrong_length_is_refused(
    tmp_path: Path, logits: NDArray[np.float64], n_bytes: int
) -> None:
    path = tmp_path / "saved.bin"
    save(path, logits)
    path.write_bytes(path.read_bytes()[:n_bytes])
    with pytest.raises(LlamaCppError, match=r"saved\.bin (holds no|has \d+ bytes)"):
        read_log_probabilities(path)


def test_distances_of_known_distributions() -> None:
    reference = np.log(np.array([[0.5, 0.25, 0.25]], np.float32))
    other = np.log(np.array([[0.25, 0.5, 0.25]], np.float32)) + 3
    agreement = compare(reference, other, np.array([1], np.int32))
    # 0.5 ln 2 - 0.25 ln 2
    assert agreement.mean_kl == pytest.approx(0.25 * np.log(2), rel=1e-6)
    assert agreement.mean_difference == pytest.approx(np.log(2), rel=1e-6)
    assert agreement.reference_perplexity == pytest.approx(4, rel=1e-6)
    assert agreement.perplexity == pytest.approx(2, rel=1e-6)
    assert agreement.top_agreement == 0


def test_what_the_file_clamps_does_not_count_as_a_difference() -> None:
    known = log_softmax(np.array([[0.0, -1.0, -40.0]]))
    saved = np.maximum(known, known.max() - 16).astype(np.float32)
    logits = np.array([[0.0, -1.0, -25.0]], np.float32)
    agreement = compare(saved, logits, np.array([2], np.int32))
    assert agreement.mean_kl < 1e-9
    assert agreement.mean_difference < 1e-5


def test_joined_windows_weigh_by_their_positions() -> None:
    reference = np.log(np.array([[0.5, 0.5]], np.float32))
    same = compare(reference, reference, np.array([0], np.int32))
    other = compare(reference, np.array([[2.0, 0.0]], np.float32), np.array([0], np.int32))
    joined = join([same, same, other])
    assert joined.mean_kl == pytest.approx(other.mean_kl / 3)
    assert joined.reference_perplexity == pytest.approx(2)
