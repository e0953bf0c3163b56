# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Finds where a growing text has ended before as it ends now, in a constant number of steps."""

from libc.stdint cimport int32_t, uint32_t, uint64_t

import numpy as np

# Tokens of an ending that is looked up, the longer first: single tokens repeat by chance.
cdef enum:
    LONG = 3
    SHORT = 2


cdef class NgramIndex:
    """A text of up to ``capacity`` tokens, and the latest occurrence of every n-gram of 3 and of 2.

    Hash tables of positions, at most half full; the text itself tells whether an entry is meant.
    They take 16 to 32 bytes per token of the capacity.
    """

    cdef readonly Py_ssize_t n_tokens
    cdef Py_ssize_t found
    cdef uint64_t mask
    cdef int32_t[::1] text
    cdef int32_t[::1] after_long  # position after the n-gram, 0: no entry
    cdef int32_t[::1] after_short

    def __init__(self, Py_ssize_t capacity):
        if not 0 < capacity < 2**31:
            raise ValueError(f"capacity must be in [1, 2**31), got {capacity}")
        size = 1 << (2 * capacity).bit_length()
        self.mask = size - 1
        self.text = np.zeros(capacity, dtype=np.int32)
        self.after_long = np.zeros(size, dtype=np.int32)
        self.after_short = np.zeros(size, dtype=np.int32)
        self.n_tokens = self.found = 0

    def extend(self, const int32_t[::1] tokens not None):
        """Adds ``tokens`` [n], int32. Raises ValueError, and adds nothing, beyond the capacity."""
        if tokens.shape[0] > self.text.shape[0] - self.n_tokens:
            raise ValueError(f"the index holds {self.text.shape[0]} tokens")
        cdef Py_ssize_t i
        for i in range(tokens.shape[0]):
            self._push(tokens[i])

    def push(self, int32_t token):
        """Adds a token. Raises ValueError beyond the capacity."""
        if self.n_tokens == self.text.shape[0]:
            raise ValueError(f"the index holds {self.text.shape[0]} tokens")
        self._push(token)

    def find(self, Py_ssize_t most):
        """Where the text went on when it ended so before, and how many tokens agree there.

        The latest occurrence of the last 3 tokens before the end, else of the last 2; (0, 0)
        without one. Tokens that agree are counted backwards, up to ``most``.
        """
        cdef Py_ssize_t length = 0
        while (
            length < self.found
            and length < most
            and self.text[self.found - 1 - length] == self.text[self.n_tokens - 1 - length]
        ):
            length += 1
        return self.found, length

    def at(self, Py_ssize_t position):
        """The token at a position. Raises ValueError where there is none."""
        if not 0 <= position < self.n_tokens:
            raise ValueError(f"position {position} is not one of the {self.n_tokens} tokens")
        return self.text[position]

    def predict(self, Py_ssize_t start, Py_ssize_t n_tokens):
        """The tokens from ``start`` on; behind the end those predicted themselves: a loop goes on.

        Raises ValueError unless ``start`` lies in the text.
        """
        if not 0 <= start < self.n_tokens:
            raise ValueError(f"position {start} is not one of the {self.n_tokens} tokens")
        cdef Py_ssize_t i, period = self.n_tokens - start
        return [self.text[start + i % period] for i in range(n_tokens)]

    cdef void _push(self, int32_t token) noexcept:
        self.text[self.n_tokens] = token
        self.n_tokens += 1
        cdef Py_ssize_t after_long = self._replace(self.after_long, LONG)
        cdef Py_ssize_t after_short = self._replace(self.after_short, SHORT)
        self.found = after_long if after_long > 0 else after_short

    cdef Py_ssize_t _replace(self, int32_t[::1] table, Py_ssize_t n) noexcept:
        """Notes that the text ends with its last ``n`` tokens; returns where it did so before."""
        cdef Py_ssize_t i, end = self.n_tokens, before
        cdef uint64_t key = 0, slot
        if end < n:
            return 0
        for i in range(end - n, end):  # SplitMix64's finaliser, token by token
            key = (key ^ <uint64_t> <uint32_t> self.text[i]) * <uint64_t> 0xBF58476D1CE4E5B9
            key ^= key >> 29
        slot = key & self.mask
        while table[slot] != 0 and not self._are_equal(table[slot], end, n):
            slot = (slot + 1) & self.mask
        before = table[slot]
        table[slot] = <int32_t> end
        return before

    cdef bint _are_equal(self, Py_ssize_t a, Py_ssize_t b, Py_ssize_t n) noexcept:
        """Whether the ``n`` tokens before both positions agree."""
        cdef Py_ssize_t i
        for i in range(1, n + 1):
            if self.text[a - i] != self.text[b - i]:
                return False
        return True
