# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Draws the next token from a vector of logits, in C loops over buffers made once.

The order of the filters is llama.cpp's: repeat penalty, top-k, top-p, min-p, temperature. top-p
and min-p therefore look at probabilities before the temperature is applied.
"""

from libc.float cimport FLT_MAX
from libc.math cimport exp, fmax, fmin, log
from libc.stdint cimport int32_t, uint64_t

import numpy as np

cdef float NEGATIVE_INFINITY = -float("inf")


cdef struct Candidate:
    float logit
    int32_t token


cdef inline bint is_worse(Candidate a, Candidate b) noexcept nogil:
    """A total order: the lower logit is worse, then the higher token id."""
    return a.logit < b.logit or (a.logit == b.logit and a.token > b.token)


cdef void sift_down(Candidate* heap, Py_ssize_t root, Py_ssize_t size) noexcept nogil:
    """Restores the heap below ``root``; the worst candidate is the top of the heap."""
    cdef Candidate moved = heap[root]
    cdef Py_ssize_t child = 2 * root + 1
    while child < size:
        if child + 1 < size and is_worse(heap[child + 1], heap[child]):
            child += 1
        if not is_worse(heap[child], moved):
            break
        heap[root] = heap[child]
        root = child
        child = 2 * root + 1
    heap[root] = moved


cdef void make_heap(Candidate* heap, Py_ssize_t size) noexcept nogil:
    cdef Py_ssize_t root
    for root in range(size // 2 - 1, -1, -1):
        sift_down(heap, root, size)


cdef void sort_best_first(Candidate* candidates, Py_ssize_t size) noexcept nogil:
    cdef Py_ssize_t last
    cdef Candidate worst
    make_heap(candidates, size)
    for last in range(size - 1, 0, -1):
        worst = candidates[0]
        candidates[0] = candidates[last]
        candidates[last] = worst
        sift_down(candidates, 0, last)


cdef inline uint64_t rotate_left(uint64_t value, int bits) noexcept nogil:
    return (value << bits) | (value >> (64 - bits))


cdef class Sampler:
    """Filters, penalty window and random state of one generation.

    ``window_size`` is how many recent tokens the repeat penalty looks at. Tokens in ``banned``
    are never drawn. Every method that takes logits raises ValueError when their number is not
    ``vocab_size``, when one is NaN or +inf, and when no token is left to draw.
    """

    cdef readonly int vocab_size
    cdef double temperature, top_p, min_p, repeat_penalty
    cdef Py_ssize_t top_k, window_used, window_next
    cdef uint64_t[4] state
    cdef int32_t[::1] banned
    cdef int32_t[::1] window
    cdef float[::1] adjusted
    cdef Candidate[::1] candidates
    cdef double[::1] weights

    def __init__(
        self,
        int vocab_size,
        *,
        double temperature,
        Py_ssize_t top_k=0,
        double top_p=1.0,
        double min_p=0.0,
        double repeat_penalty=1.0,
        Py_ssize_t window_size=0,
        uint64_t seed=0,
        banned=(),
    ):
        if vocab_size <= 0 or top_k < 0 or window_size < 0:
            raise ValueError("vocab_size must be positive, top_k and window_size not negative")
        banned_ids = np.array(sorted(banned), dtype=np.int32)
        if banned_ids.size and not (
            banned_ids.min() >= 0 and banned_ids.max() < vocab_size
        ):
            raise ValueError(f"banned token ids must be in [0, {vocab_size})")
        self.vocab_size = vocab_size
        self.temperature = temperature
        self.top_k = top_k if 0 < top_k < vocab_size else vocab_size
        self.top_p = top_p
        self.min_p = min_p
        self.repeat_penalty = repeat_penalty
        self._seed(seed)
        self.banned = banned_ids
        self.window = np.zeros(window_size if repeat_penalty != 1.0 else 0, dtype=np.int32)
        self.window_used = 0
        self.window_next = 0
        self.adjusted = np.empty(vocab_size, dtype=np.float32)
        self.candidates = np.empty(vocab_size, dtype=[("logit", "f4"), ("token", "i4")])
        self.weights = np.empty(vocab_size, dtype=np.float64)

    def twin(self, int vocab_size):
        """A sampler that draws alike from the logits of a model of ``vocab_size`` tokens."""
        return Sampler(
            vocab_size,
            temperature=self.temperature,
            top_k=0 if self.top_k == self.vocab_size else self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repeat_penalty=self.repeat_penalty,
            window_size=self.window.shape[0],
            banned=[token for token in self.banned if token < vocab_size],
        )

    def follow(self, Sampler other not None) -> None:
        """Takes over the random state and the recent tokens of ``other``, which stays as it is.

        Raises ValueError where its options differ, or a recent token is outside the vocabulary.
        """
        if self.window.shape[0] != other.window.shape[0]:
            raise ValueError("the samplers look at different numbers of recent tokens")
        cdef Py_ssize_t i
        for i in range(other.window_used):
            if other.window[i] >= self.vocab_size:
                raise ValueError(
                    f"token id {other.window[i]} is outside the vocabulary of {self.vocab_size}"
                )
        for i in range(other.window_used):
            self.window[i] = other.window[i]
        self.window_used = other.window_used
        self.window_next = other.window_next
        for i in range(4):
            self.state[i] = other.state[i]

    def accept(self, int token) -> None:
        """Adds ``token`` to the window of the repeat penalty and drops the oldest one."""
        if not 0 <= token < self.vocab_size:
            raise ValueError(f"token id {token} is outside the vocabulary of {self.vocab_size}")
        cdef Py_ssize_t size = self.window.shape[0]
        if size == 0:
            return
        self.window[self.window_next] = token
        self.window_next = self.window_next + 1 if self.window_next + 1 < size else 0
        self.window_used = self.window_used + 1 if self.window_used < size else size

    def sample(self, const float[::1] logits not None, const unsigned char[::1] mask=None) -> int:
        """Draws a token id from ``logits`` [vocab_size], float32.

        With ``mask`` only the tokens can be drawn whose bits are set: bit i % 8 of byte i // 8 is
        that of token i.
        """
        self._adjust(logits)
        if mask is not None:
            self._apply(mask)
        if self.temperature == 0.0:
            return self._best()
        cdef Py_ssize_t kept = self._filter()
        cdef double remaining = self._next_uniform() * self._weigh(kept)
        cdef Py_ssize_t i
        for i in range(kept):
            remaining -= self.weights[i]
            if remaining < 0.0:
                return self.candidates[i].token
        # Rounding of the running difference can leave a few ulp over.
        return self.candidates[kept - 1].token

    def distribution(self, const float[::1] logits not None):
        """Token ids [n] int32, most likely first, and their probabilities [n] float64.

        These are what ``sample`` would draw from; the random state does not move.
        """
        self._adjust(logits)
        if self.temperature == 0.0:
            return np.array([self._best()], dtype=np.int32), np.ones(1)
        cdef Py_ssize_t kept = self._filter()
        sort_best_first(&self.candidates[0], kept)
        cdef double total = self._weigh(kept)
        tokens = np.asarray(self.candidates[:kept])["token"].copy()
        return tokens, np.asarray(self.weights[:kept]) / total

    cdef void _seed(self, uint64_t seed) noexcept:
        """Fills the xoshiro256** state by SplitMix64, as its authors advise."""
        cdef uint64_t mixed
        cdef int i
        for i in range(4):
            seed += <uint64_t> 0x9E3779B97F4A7C15
            mixed = seed
            mixed = (mixed ^ (mixed >> 30)) * <uint64_t> 0xBF58476D1CE4E5B9
            mixed = (mixed ^ (mixed >> 27)) * <uint64_t> 0x94D049BB133111EB
            self.state[i] = mixed ^ (mixed >> 31)

    cdef double _next_uniform(self) noexcept nogil:
        """The next double in [0, 1) of xoshiro256** (Blackman and Vigna), 53 bits."""
        cdef uint64_t result = rotate_left(self.state[1] * 5, 7) * 9
        cdef uint64_t shifted = self.state[1] << 17
        self.state[2] ^= self.state[0]
        self.state[3] ^= self.state[1]
        self.state[1] ^= self.state[2]
        self.state[0] ^= self.state[3]
        self.state[2] ^= shifted
        self.state[3] = rotate_left(self.state[3], 45)
        return <double> (result >> 11) * (1.0 / 9007199254740992.0)

    cdef int _adjust(self, const float[::1] logits) except -1:
        """Copies the logits, then applies the repeat penalty and the bans."""
        cdef Py_ssize_t i
        cdef int32_t token
        cdef double value
        if logits.shape[0] != self.vocab_size:
            raise ValueError(f"expected {self.vocab_size} logits, got {logits.shape[0]}")
        cdef const float* given = &logits[0]
        cdef float* adjusted = &self.adjusted[0]
        cdef Py_ssize_t n_bad = 0
        for i in range(self.vocab_size):  # without branches: -inf may be anywhere
            n_bad += not given[i] <= FLT_MAX
            adjusted[i] = given[i]
        if n_bad:
            i = next(k for k in range(self.vocab_size) if not logits[k] <= FLT_MAX)
            raise ValueError(f"the logit of token {i} is {logits[i]}")
        for i in range(self.window_used):
            # Read from the source: a token that is in the window twice is penalised once.
            token = self.window[i]
            value = logits[token]
            if value == NEGATIVE_INFINITY:
                continue
            value = value / self.repeat_penalty if value > 0 else value * self.repeat_penalty
            self.adjusted[token] = <float> fmin(fmax(value, -FLT_MAX), FLT_MAX)
        for i in range(self.banned.shape[0]):
            self.adjusted[self.banned[i]] = NEGATIVE_INFINITY
        return 0

    cdef void _apply(self, const unsigned char[::1] mask) noexcept:
        """Leaves the tokens whose bits are set."""
        cdef Py_ssize_t i, n_bits = min(8 * mask.shape[0], <Py_ssize_t> self.vocab_size)
        cdef float* adjusted = &self.adjusted[0]
        cdef float nothing = NEGATIVE_INFINITY
        cdef const unsigned char* bits = &mask[0] if n_bits > 0 else NULL
        for i in range(n_bits):
            adjusted[i] = adjusted[i] if bits[i >> 3] >> (i & 7) & 1 else nothing
        for i in range(n_bits, self.vocab_size):
            adjusted[i] = nothing

    cdef int _best(self) except -1:
        cdef Py_ssize_t i, best = 0
        cdef const float* adjusted = &self.adjusted[0]
        for i in range(1, self.vocab_size):
            if adjusted[i] > adjusted[best]:
                best = i
        if adjusted[best] == NEGATIVE_INFINITY:
            raise ValueError("every token is banned or has a logit of -inf")
        return <int> best

    cdef Py_ssize_t _filter(self) except -1:
        """Leaves the tokens that may be drawn in ``candidates``; returns their number."""
        cdef double best = self.adjusted[self._best()]
        cdef double share_of_best, total = 0.0, mass = 0.0
        cdef Py_ssize_t i, used, kept = 0
        if self.top_k < self.vocab_size:
            used = self._take_top_k()
            for i in range(used):
                total += exp(self.candidates[i].logit - best)
        else:
            if self.top_p < 1.0:
                for i in range(self.vocab_size):
                    total += exp(self.adjusted[i] - best)
            used = self._take_above(best, total)
        if self.top_p < 1.0:
            sort_best_first(&self.candidates[0], used)
        elif self.min_p <= 0.0:
            return used
        for i in range(used):
            if self.top_p < 1.0 and mass >= self.top_p * total:
                break
            share_of_best = exp(self.candidates[i].logit - best)
            mass += share_of_best
            if share_of_best >= self.min_p:
                self.candidates[kept] = self.candidates[i]
                kept += 1
        return kept

    cdef Py_ssize_t _take_top_k(self) noexcept nogil:
        """Collects the ``top_k`` best tokens in one pass over a heap of that size."""
        cdef Candidate* heap = &self.candidates[0]
        cdef const float* adjusted = &self.adjusted[0]
        cdef Py_ssize_t i = 0, used = 0
        while i < self.vocab_size and used < self.top_k:
            heap[used].logit = adjusted[i]
            heap[used].token = <int32_t> i
            used += adjusted[i] > NEGATIVE_INFINITY
            i += 1
        make_heap(heap, used)
        for i in range(i, self.vocab_size):
            if adjusted[i] > heap[0].logit:
                heap[0].logit = adjusted[i]
                heap[0].token = <int32_t> i
                sift_down(heap, 0, used)
        return used

    cdef Py_ssize_t _take_above(self, double best, double total) noexcept nogil:
        """Collects the tokens that top-p and min-p can keep, so that few need sorting.

        Tokens whose probability is below ``(1 - top_p) / vocab_size`` weigh less than
        ``1 - top_p`` together, so the most likely tokens reach ``top_p`` without them.
        """
        cdef double floor = NEGATIVE_INFINITY
        cdef double slack = 1e-6
        cdef Py_ssize_t i, used = 0
        if self.min_p > 0.0:
            floor = best + log(self.min_p) - slack
        if self.top_p < 1.0:
            floor = fmax(floor, best + log((1.0 - self.top_p) / self.vocab_size * total) - slack)
        cdef Candidate* found = &self.candidates[0]
        cdef const float* adjusted = &self.adjusted[0]
        for i in range(self.vocab_size):  # without branches: -inf may be anywhere
            found[used].logit = adjusted[i]
            found[used].token = <int32_t> i
            used += (adjusted[i] >= floor) & (adjusted[i] > NEGATIVE_INFINITY)
        return used

    cdef double _weigh(self, Py_ssize_t kept) noexcept nogil:
        """Fills ``weights`` with exp((logit - best) / temperature); returns their sum."""
        cdef double best = self.candidates[0].logit
        cdef double total = 0.0
        cdef Py_ssize_t i
        for i in range(1, kept):
            best = fmax(best, self.candidates[i].logit)
        for i in range(kept):
            self.weights[i] = exp((self.candidates[i].logit - best) / self.temperature)
            total += self.weights[i]
        return total
