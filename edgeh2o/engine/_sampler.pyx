# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Draws the next token from a vector of logits, in C loops over buffers made once.

The order is llama.cpp's: repeat penalty, DRY, top-n-sigma, top-k, typical, top-p, min-p, XTC,
temperature. Filters therefore look at probabilities before the temperature is applied.
"""

from libc.float cimport FLT_MAX
from libc.math cimport exp, fmax, fmin, log, sqrt
from libc.stdint cimport int32_t, uint64_t
from libc.string cimport memcpy, memmove

from edgeh2o.engine._candidates cimport (
    BLOCK,
    Candidate,
    best_of,
    count_top_choices,
    has_above,
    keep_typical,
    make_heap,
    sift_down,
    sort_best_first,
    sum_of,
    temperature_of,
)
from edgeh2o.engine._random cimport next_uniform, seed_state
from edgeh2o.engine._repetition cimport Breakers, DryPenalty, penalise_repetition

import numpy as np

cdef float NEGATIVE_INFINITY = -float("inf")


_NOT_FOR_TWINS = ("self", "vocab_size", "seed")


cdef class Sampler:
    """Filters, recent tokens and random state of one generation.

    ``window_size`` is how many recent tokens the repeat penalty looks at, ``dry_window_size`` how
    many DRY does, whose ``breakers`` are sequences of tokens that no repetition goes over. Tokens
    in ``banned`` are never drawn. Every method that takes logits raises ValueError when their
    number is not ``vocab_size``, when one is NaN or +inf, and when no token is left to draw.
    """

    cdef readonly int vocab_size
    cdef const float* values  # of the draw that is made
    cdef Py_ssize_t best
    cdef dict options
    cdef double temperature, dynatemp_range, dynatemp_exponent
    cdef double top_n_sigma, top_p, min_p, typical_p, xtc_probability, xtc_threshold
    cdef double repeat_penalty
    cdef DryPenalty dry
    cdef Py_ssize_t top_k, window_size, dry_window_size, n_recent
    cdef uint64_t[4] state
    cdef int32_t[::1] banned
    cdef int32_t[::1] recent  # the last half of it at least counts
    cdef unsigned char[::1] begins_breaker
    cdef int32_t[::1] longer_breakers
    cdef int32_t[::1] breaker_ends
    cdef int32_t[::1] repeats
    cdef int32_t[::1] longest
    cdef float[::1] adjusted
    cdef Candidate[::1] candidates
    cdef Candidate[::1] spare
    cdef double[::1] weights

    def __init__(
        self,
        int vocab_size,
        *,
        double temperature,
        double dynatemp_range=0.0,
        double dynatemp_exponent=1.0,
        double top_n_sigma=-1.0,
        Py_ssize_t top_k=0,
        double typical_p=1.0,
        double top_p=1.0,
        double min_p=0.0,
        double xtc_probability=0.0,
        double xtc_threshold=0.1,
        double repeat_penalty=1.0,
        Py_ssize_t window_size=0,
        double dry_multiplier=0.0,
        double dry_base=1.75,
        Py_ssize_t dry_allowed_length=2,
        Py_ssize_t dry_window_size=0,
        breakers=(),
        uint64_t seed=0,
        banned=(),
    ):
        breakers, banned = [tuple(breaker) for breaker in breakers], sorted(banned)
        given = locals()
        self.options = {name: given[name] for name in given if name not in _NOT_FOR_TWINS}
        if vocab_size <= 0 or min(top_k, window_size, dry_window_size, dry_allowed_length) < 0:
            raise ValueError("vocab_size must be positive, counts must not be negative")
        self.vocab_size = vocab_size
        self.temperature = temperature
        self.dynatemp_range, self.dynatemp_exponent = dynatemp_range, dynatemp_exponent
        self.top_n_sigma = top_n_sigma
        self.top_k = top_k if 0 < top_k < vocab_size else vocab_size
        self.typical_p, self.top_p, self.min_p = typical_p, top_p, min_p
        self.xtc_probability, self.xtc_threshold = xtc_probability, xtc_threshold
        self.repeat_penalty = repeat_penalty
        self.window_size = window_size if repeat_penalty != 1.0 else 0
        self.dry = DryPenalty(dry_multiplier, dry_base, dry_allowed_length)
        self.dry_window_size = dry_window_size if dry_multiplier != 0.0 else 0
        seed_state(self.state, seed)
        self.banned = self._token_ids("banned token ids", banned)
        self.recent = np.zeros(2 * max(self.window_size, self.dry_window_size), np.int32)
        self.n_recent = 0
        if self.dry_window_size:
            self._read_breakers(breakers)
            self.repeats = np.empty(self.dry_window_size, np.int32)
            self.longest = np.zeros(vocab_size, np.int32)
        self.adjusted = np.empty(vocab_size, dtype=np.float32)
        self.candidates = np.empty(vocab_size, dtype=[("logit", "f4"), ("token", "i4")])
        self.spare = np.empty(vocab_size if typical_p < 1.0 else 0, self.candidates.base.dtype)
        self.weights = np.empty(vocab_size, dtype=np.float64)

    def _token_ids(self, name, ids):
        array = np.array(ids, dtype=np.int32)
        if array.size and not (array.min() >= 0 and array.max() < self.vocab_size):
            raise ValueError(f"{name} must be in [0, {self.vocab_size})")
        return array

    def _read_breakers(self, breakers) -> None:
        begins = np.zeros(self.vocab_size, np.uint8)
        longer = sorted({breaker for breaker in breakers if len(breaker) > 1})
        alone = [breaker[0] for breaker in breakers if len(breaker) == 1]
        single = self._token_ids("breakers", alone)
        tokens = self._token_ids("breakers", [token for breaker in longer for token in breaker])
        begins[single] |= 1
        begins[[breaker[0] for breaker in longer]] |= 2
        self.begins_breaker, self.longer_breakers = begins, tokens
        self.breaker_ends = np.cumsum([len(breaker) for breaker in longer], dtype=np.int32)

    def twin(self, int vocab_size):
        """A sampler that draws alike from the logits of a model of ``vocab_size`` tokens."""
        breakers = [each for each in self.options["breakers"] if max(each) < vocab_size]
        banned = [token for token in self.options["banned"] if token < vocab_size]
        return Sampler(vocab_size, **{**self.options, "breakers": breakers, "banned": banned})

    def follow(self, Sampler other not None) -> None:
        """Takes over the random state and the recent tokens of ``other``, which stays as it is.

        Raises ValueError where its options differ, or a recent token is outside the vocabulary.
        """
        if self.recent.shape[0] != other.recent.shape[0]:
            raise ValueError("the samplers look at different numbers of recent tokens")
        cdef Py_ssize_t i
        for i in range(other.n_recent):
            if other.recent[i] >= self.vocab_size:
                raise ValueError(
                    f"token id {other.recent[i]} is outside the vocabulary of {self.vocab_size}"
                )
        for i in range(other.n_recent):
            self.recent[i] = other.recent[i]
        self.n_recent = other.n_recent
        for i in range(4):
            self.state[i] = other.state[i]

    def accept(self, int token) -> None:
        """Adds ``token`` to the recent ones, of which penalties look at the last."""
        if not 0 <= token < self.vocab_size:
            raise ValueError(f"token id {token} is outside the vocabulary of {self.vocab_size}")
        cdef Py_ssize_t size = self.recent.shape[0], half = size // 2
        if size == 0:
            return
        if self.n_recent == size:
            memmove(&self.recent[0], &self.recent[half], half * sizeof(int32_t))
            self.n_recent = half
        self.recent[self.n_recent] = token
        self.n_recent += 1

    def sample(self, logits not None, const unsigned char[::1] mask=None) -> int:
        """Draws a token id from ``logits`` [vocab_size], float32.

        With ``mask`` only the tokens can be drawn whose bits are set: bit i % 8 of byte i // 8 is
        that of token i.
        """
        self._read(logits, mask)
        if self.temperature == 0.0:
            return self.best
        cdef Py_ssize_t i, first = 0, kept = self._filter()
        if self.xtc_probability > 0.0 and next_uniform(self.state) < self.xtc_probability:
            first = count_top_choices(&self.candidates[0], kept, self.xtc_threshold)
        cdef double remaining = next_uniform(self.state) * self._weigh(first, kept)
        for i in range(first, kept):
            remaining -= self.weights[i]
            if remaining < 0.0:
                return self.candidates[i].token
        # Rounding of the running difference can leave a few ulp over.
        return self.candidates[kept - 1].token

    def distribution(self, logits not None):
        """Token ids [n] int32, most likely first, and their probabilities [n] float64.

        These are what ``sample`` would draw from, with XTC and without by their shares; the random
        state does not move.
        """
        self._read(logits, None)
        if self.temperature == 0.0:
            return np.array([self.best], dtype=np.int32), np.ones(1)
        cdef Py_ssize_t kept = self._filter()
        cdef Py_ssize_t first = count_top_choices(&self.candidates[0], kept, self.xtc_threshold)
        cdef double total = self._weigh(0, kept)
        tokens = np.asarray(self.candidates[:kept])["token"].copy()
        probabilities = np.asarray(self.weights[:kept]) / total
        if self.xtc_probability > 0.0:
            probabilities *= 1.0 - self.xtc_probability
            total = self._weigh(first, kept)
            excluded = np.asarray(self.weights[first:kept]) / total
            probabilities[first:] += self.xtc_probability * excluded
        return tokens, probabilities

    cdef int _read(self, logits, const unsigned char[::1] mask) except -1:
        """Sets ``values``, what is drawn from: the logits or a copy that was changed; and ``best``.

        NumPy's argmax takes a tenth of the time of a loop here, and finds NaN before all else.
        """
        cdef const float[::1] given = logits
        if given.shape[0] != self.vocab_size:
            raise ValueError(f"expected {self.vocab_size} logits, got {given.shape[0]}")
        self.best = np.argmax(logits)
        if not given[self.best] <= FLT_MAX:
            raise ValueError(f"the logit of token {self.best} is {given[self.best]}")
        self.values = &given[0]
        cdef bint penalises = self.n_recent > 0  # which are kept for penalties alone
        if penalises or self.banned.shape[0] or mask is not None or self.top_n_sigma > 0.0:
            memcpy(&self.adjusted[0], &given[0], self.vocab_size * sizeof(float))
            self._adjust(mask)
            self.values = &self.adjusted[0]
            self.best = np.argmax(self.adjusted.base)
            if self.top_n_sigma > 0.0:
                self._drop_unlikely(self.values[self.best])
        if self.values[self.best] == NEGATIVE_INFINITY:
            raise ValueError("every token is banned or has a logit of -inf")
        return 0

    cdef void _adjust(self, const unsigned char[::1] mask) noexcept:
        """Applies the penalties, the bans and the mask to the copy."""
        cdef Py_ssize_t i
        cdef int32_t token
        cdef double value
        for i in range(max(0, self.n_recent - self.window_size), self.n_recent):
            # Read from the source: a token that is in the window twice is penalised once.
            token = self.recent[i]
            value = self.values[token]
            if value == NEGATIVE_INFINITY:
                continue
            value = value / self.repeat_penalty if value > 0 else value * self.repeat_penalty
            self.adjusted[token] = <float> fmin(fmax(value, -FLT_MAX), FLT_MAX)
        if self.dry_window_size:
            self._penalise_repetition()
        for i in range(self.banned.shape[0]):
            self.adjusted[self.banned[i]] = NEGATIVE_INFINITY
        if mask is not None:
            self._apply(mask)

    cdef void _penalise_repetition(self) noexcept:
        cdef Py_ssize_t n = min(self.dry_window_size, self.n_recent)
        cdef Breakers breakers = Breakers(&self.begins_breaker[0], NULL, NULL, 0)
        if self.breaker_ends.shape[0]:
            breakers.longer, breakers.ends = &self.longer_breakers[0], &self.breaker_ends[0]
            breakers.n_longer = self.breaker_ends.shape[0]
        penalise_repetition(
            &self.adjusted[0],
            &self.recent[self.n_recent - n],
            n,
            self.dry,
            breakers,
            &self.repeats[0],
            &self.longest[0],
        )

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

    cdef Py_ssize_t _filter(self) noexcept nogil:
        """Leaves the tokens that may be drawn in ``candidates``; returns their number."""
        cdef double best = self.values[self.best]
        cdef double share_of_best, total = 0.0, mass = 0.0
        cdef Py_ssize_t i, used, kept = 0
        if self.top_k < self.vocab_size:
            used = self._take_top_k()
        else:
            if self.top_p < 1.0 and self.typical_p >= 1.0:
                for i in range(self.vocab_size):
                    total += exp(self.values[i] - best)
            used = self._take_above(best, total)
        if self.typical_p < 1.0:
            used = keep_typical(&self.candidates[0], &self.spare[0], used, self.typical_p)
            best = best_of(&self.candidates[0], used)
        if self.top_k < self.vocab_size or self.typical_p < 1.0:
            total = sum_of(&self.candidates[0], used, best)
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

    cdef void _drop_unlikely(self, double best) noexcept:
        """Leaves logits down to ``top_n_sigma`` standard deviations below the best."""
        cdef double mean = 0.0, variance = 0.0, floor
        cdef Py_ssize_t i, n = 0
        cdef float* adjusted = &self.adjusted[0]
        for i in range(self.vocab_size):
            if adjusted[i] > NEGATIVE_INFINITY:
                mean += adjusted[i]
                n += 1
        mean /= n
        for i in range(self.vocab_size):
            if adjusted[i] > NEGATIVE_INFINITY:
                variance += (adjusted[i] - mean) * (adjusted[i] - mean)
        floor = best - self.top_n_sigma * sqrt(variance / n)
        for i in range(self.vocab_size):
            if adjusted[i] < floor:
                adjusted[i] = NEGATIVE_INFINITY

    cdef Py_ssize_t _take_top_k(self) noexcept nogil:
        """Collects the ``top_k`` best tokens in one pass over a heap of that size."""
        cdef Candidate* heap = &self.candidates[0]
        cdef const float* values = self.values
        cdef Py_ssize_t i = 0, used = 0, end
        while i < self.vocab_size and used < self.top_k:
            heap[used].logit = values[i]
            heap[used].token = <int32_t> i
            used += values[i] > NEGATIVE_INFINITY
            i += 1
        make_heap(heap, used)
        while i < self.vocab_size:
            end = min(i + BLOCK, <Py_ssize_t> self.vocab_size)
            if end < i + BLOCK or has_above(&values[i], heap[0].logit):
                for i in range(i, end):
                    if values[i] > heap[0].logit:
                        heap[0].logit = values[i]
                        heap[0].token = <int32_t> i
                        sift_down(heap, 0, used)
            i = end
        return used

    cdef Py_ssize_t _take_above(self, double best, double total) noexcept nogil:
        """Collects the tokens that top-p and min-p can keep, so that few need sorting.

        Typical ones are chosen before them, among all.
        Tokens whose probability is below ``(1 - top_p) / vocab_size`` weigh less than
        ``1 - top_p`` together, so the most likely tokens reach ``top_p`` without them.
        """
        cdef double floor = NEGATIVE_INFINITY
        cdef double slack = 1e-6
        cdef Py_ssize_t i, used = 0
        cdef bint is_first = self.typical_p >= 1.0
        if is_first and self.min_p > 0.0:
            floor = best + log(self.min_p) - slack
        if is_first and self.top_p < 1.0:
            floor = fmax(floor, best + log((1.0 - self.top_p) / self.vocab_size * total) - slack)
        cdef Candidate* found = &self.candidates[0]
        cdef const float* values = self.values
        for i in range(self.vocab_size):  # without branches: -inf may be anywhere
            found[used].logit = values[i]
            found[used].token = <int32_t> i
            used += (values[i] >= floor) & (values[i] > NEGATIVE_INFINITY)
        return used

    cdef double _weigh(self, Py_ssize_t first, Py_ssize_t kept) noexcept nogil:
        """Fills ``weights`` with exp((logit - best) / temperature); returns their sum."""
        cdef const Candidate* candidates = &self.candidates[0]
        cdef double best = best_of(&candidates[first], kept - first), total = 0.0
        cdef double temperature = temperature_of(
            &candidates[first],
            kept - first,
            self.temperature,
            self.dynatemp_range,
            self.dynatemp_exponent,
        )
        cdef Py_ssize_t i
        for i in range(first, kept):
            self.weights[i] = exp((candidates[i].logit - best) / temperature)
            total += self.weights[i]
        return total
