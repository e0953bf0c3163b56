# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The tokens before a draw, and what others lose by them: the repeat penalty and DRY."""

from libc.float cimport FLT_MAX
from libc.math cimport fmax, fmin
from libc.stdint cimport int32_t
from libc.string cimport memmove

from edgeh2o.engine._repetition cimport Breakers, DryPenalty, penalise_repetition

import numpy as np

cdef float NEGATIVE_INFINITY = -float("inf")


def token_ids(name, ids, vocab_size):
    """``ids`` as int32. Raises ValueError for one outside the vocabulary."""
    array = np.array(ids, dtype=np.int32)
    if array.size and not (array.min() >= 0 and array.max() < vocab_size):
        raise ValueError(f"{name} must be in [0, {vocab_size})")
    return array


cdef class RecentTokens:
    """Those of one generation, as many as its penalties look at.

    ``window_size`` is how many the repeat penalty looks at, ``dry_window_size`` how many DRY does,
    whose ``breakers`` are sequences of tokens that no repetition goes over.
    """

    def __init__(
        self,
        int vocab_size,
        *,
        double repeat_penalty,
        Py_ssize_t window_size,
        double dry_multiplier,
        double dry_base,
        Py_ssize_t dry_allowed_length,
        Py_ssize_t dry_window_size,
        breakers,
    ):
        self.vocab_size = vocab_size
        self.repeat_penalty = repeat_penalty
        self.window_size = window_size if repeat_penalty != 1.0 else 0
        self.dry = DryPenalty(dry_multiplier, dry_base, dry_allowed_length)
        self.dry_window_size = dry_window_size if dry_multiplier != 0.0 else 0
        self.tokens = np.zeros(2 * max(self.window_size, self.dry_window_size), np.int32)
        self.n_kept = 0
        if self.dry_window_size:
            self._read_breakers(breakers)
            self.repeats = np.empty(self.dry_window_size, np.int32)
            self.longest = np.zeros(vocab_size, np.int32)

    def _read_breakers(self, breakers) -> None:
        begins = np.zeros(self.vocab_size, np.uint8)
        longer = sorted({breaker for breaker in breakers if len(breaker) > 1})
        alone = [breaker[0] for breaker in breakers if len(breaker) == 1]
        single = token_ids("breakers", alone, self.vocab_size)
        behind = [token for breaker in longer for token in breaker]
        tokens = token_ids("breakers", behind, self.vocab_size)
        begins[single] |= 1
        begins[[breaker[0] for breaker in longer]] |= 2
        self.begins_breaker, self.longer_breakers = begins, tokens
        self.breaker_ends = np.cumsum([len(breaker) for breaker in longer], dtype=np.int32)

    cdef void follow(self, RecentTokens other) except *:
        """Takes over the tokens of ``other``.

        Raises ValueError where it keeps another number, or one is outside the vocabulary.
        """
        if self.tokens.shape[0] != other.tokens.shape[0]:
            raise ValueError("the samplers look at different numbers of recent tokens")
        cdef Py_ssize_t i
        for i in range(other.n_kept):
            if other.tokens[i] >= self.vocab_size:
                raise ValueError(
                    f"token id {other.tokens[i]} is outside the vocabulary of {self.vocab_size}"
                )
        for i in range(other.n_kept):
            self.tokens[i] = other.tokens[i]
        self.n_kept = other.n_kept

    cdef void accept(self, int32_t token) noexcept:
        cdef Py_ssize_t size = self.tokens.shape[0], half = size // 2
        if size == 0:
            return
        if self.n_kept == size:
            memmove(&self.tokens[0], &self.tokens[half], half * sizeof(int32_t))
            self.n_kept = half
        self.tokens[self.n_kept] = token
        self.n_kept += 1

    cdef void penalise(self, const float* logits, float* adjusted) noexcept:
        """By the repeat penalty; ``adjusted`` is a copy of ``logits`` [vocab_size]."""
        cdef Py_ssize_t i
        cdef int32_t token
        cdef double value
        for i in range(max(0, self.n_kept - self.window_size), self.n_kept):
            # Read from the source: a token that is in the window twice is penalised once.
            token = self.tokens[i]
            value = logits[token]
            if value == NEGATIVE_INFINITY:
                continue
            value = value / self.repeat_penalty if value > 0 else value * self.repeat_penalty
            adjusted[token] = <float> fmin(fmax(value, -FLT_MAX), FLT_MAX)

    cdef void penalise_repetition(self, float* logits) noexcept:
        """By DRY, if it is on."""
        cdef Py_ssize_t n = min(self.dry_window_size, self.n_kept)
        if self.dry_window_size == 0:
            return
        cdef Breakers breakers = Breakers(&self.begins_breaker[0], NULL, NULL, 0)
        if self.breaker_ends.shape[0]:
            breakers.longer, breakers.ends = &self.longer_breakers[0], &self.breaker_ends[0]
            breakers.n_longer = self.breaker_ends.shape[0]
        penalise_repetition(
            logits,
            &self.tokens[self.n_kept - n],
            n,
            self.dry,
            breakers,
            &self.repeats[0],
            &self.longest[0],
        )
