# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Draws the next token from a vector of logits, in C loops over buffers made once.

The usual order is llama.cpp's: repeat penalty, DRY, top-n-sigma, top-k, typical, top-p, min-p,
XTC, temperature. Filters therefore look at probabilities before the temperature is applied, and
several of them go together. In another order each changes what the one before left
(``_run_chain``). Behind all of them stands adaptive-p, where it acts.
"""

from libc.float cimport FLT_MAX
from libc.math cimport log2
from libc.stdint cimport int32_t, uint64_t
from libc.string cimport memcpy, memmove

from edgeh2o.engine._candidates cimport Candidate, count_top_choices, is_worse, keep_typical
from edgeh2o.engine._filters cimport (
    Filters,
    allow,
    cool,
    drop_unlikely,
    keep_min_p,
    keep_near_best,
    keep_top_k,
    keep_top_p,
    take_above,
    take_filtered,
)
from edgeh2o.engine._mirostat cimport keep_below_surprise, take_by_rank
from edgeh2o.engine._random cimport next_uniform, seed_state
from edgeh2o.engine._recent_tokens cimport RecentTokens
from edgeh2o.engine._weights cimport (
    Adaptive,
    begin_adaptive,
    heat_of,
    note_drawn,
    weigh,
    weigh_near_target,
)

import numpy as np

from ..sampler_names import SAMPLERS
from ._recent_tokens import token_ids
from .sampler_order import arrange

cdef float NEGATIVE_INFINITY = -float("inf")

_NOT_FOR_TWINS = ("self", "vocab_size", "seed")

# What changes nothing, and the places of ``SAMPLERS``.
cdef Filters NO_FILTERS = Filters(1.0, 0.0, 1.0, -1.0, 1.0, 0.0, 1.0, 0.0, 0.1, 0)

cdef enum:
    PENALTIES, DRY, TOP_N_SIGMA, TOP_K, TYPICAL, TOP_P, MIN_P, XTC, TEMPERATURE


cdef class Sampler:
    """Filters, recent tokens and random state of one generation.

    ``window_size`` is how many recent tokens the repeat penalty looks at, ``dry_window_size`` how
    many DRY does, whose ``breakers`` are sequences of tokens that no repetition goes over.
    ``samplers`` are those that act, in their order; ``mirostat`` 1 or 2 acts in their place, and
    ``mu`` bits of surprise are what a token may have then. Near ``adaptive_target``, if that is not
    negative and "adaptive_p" one of ``samplers``, are the probabilities of what is drawn, on the
    average over about 1 / (1 - ``adaptive_decay``) tokens. Tokens in ``banned`` are never drawn.
    Every method that takes logits raises ValueError when their number is not ``vocab_size``, when
    one is NaN or +inf, and when no token is left to draw.
    """

    cdef readonly int vocab_size
    cdef const float* values  # of the draw that is made
    cdef Py_ssize_t best
    cdef dict options
    cdef bint is_greedy
    cdef Filters filters
    cdef Filters chained  # those of ``chain``, which is empty in the usual order
    cdef int32_t[::1] chain
    cdef int mirostat
    cdef double mirostat_tau, mirostat_eta
    cdef readonly double mu
    cdef Py_ssize_t n_drawn_from  # of the latest draw that mirostat has not learnt from
    cdef Py_ssize_t first_drawn
    cdef double drawn_total
    cdef Adaptive adaptive
    cdef double[::1] shares  # probabilities before adaptive-p
    cdef RecentTokens recent
    cdef uint64_t[4] state
    cdef int32_t[::1] banned
    cdef float[::1] adjusted
    cdef float[::1] scattered
    cdef Candidate[::1] candidates
    cdef Candidate[::1] spare
    cdef double[::1] weights

    def __init__(
        self,
        int vocab_size,
        *,
        double temperature, double dynatemp_range=0.0, double dynatemp_exponent=1.0,
        double top_n_sigma=-1.0, Py_ssize_t top_k=0, double typical_p=1.0,
        double top_p=1.0, double min_p=0.0,
        double xtc_probability=0.0, double xtc_threshold=0.1,
        double repeat_penalty=1.0, Py_ssize_t window_size=0,
        double dry_multiplier=0.0, double dry_base=1.75,
        Py_ssize_t dry_allowed_length=2, Py_ssize_t dry_window_size=0, breakers=(),
        samplers=SAMPLERS,
        int mirostat=0, double mirostat_tau=5.0, double mirostat_eta=0.1,
        double adaptive_target=-1.0, double adaptive_decay=0.9,
        uint64_t seed=0,
        banned=(),
    ):
        breakers, banned = [tuple(breaker) for breaker in breakers], sorted(banned)
        given = locals()
        self.options = {name: given[name] for name in given if name not in _NOT_FOR_TWINS}
        if vocab_size <= 0 or min(top_k, window_size, dry_window_size, dry_allowed_length) < 0:
            raise ValueError("vocab_size must be positive, counts must not be negative")
        if not 0 <= mirostat <= 2:
            raise ValueError(f"mirostat must be 0, 1 or 2, got {mirostat}")
        if not (adaptive_target <= 1.0 and 0.0 <= adaptive_decay < 1.0):
            raise ValueError("adaptive_target is 1 at most, adaptive_decay from 0 to below 1")
        acting, chain = arrange(self.options, vocab_size)
        self.vocab_size = vocab_size
        self.is_greedy = acting["temperature"] == 0.0
        self.filters = Filters(
            acting["temperature"], acting["dynatemp_range"], dynatemp_exponent,
            acting["top_n_sigma"], acting["top_p"], acting["min_p"], acting["typical_p"],
            acting["xtc_probability"], xtc_threshold,
            acting["top_k"] or vocab_size,
        )
        self.chain = np.array([SAMPLERS.index(name) for name in chain], np.int32)
        if chain:
            self.chained, self.filters = self.filters, NO_FILTERS
        self.mirostat, self.mirostat_tau, self.mirostat_eta = mirostat, mirostat_tau, mirostat_eta
        self.mu = 2.0 * mirostat_tau
        self.n_drawn_from = self.first_drawn = 0
        self.adaptive = begin_adaptive(acting["adaptive_target"], adaptive_decay)
        self.recent = RecentTokens(
            vocab_size,
            repeat_penalty=acting["repeat_penalty"],
            window_size=window_size,
            dry_multiplier=acting["dry_multiplier"],
            dry_base=dry_base,
            dry_allowed_length=dry_allowed_length,
            dry_window_size=dry_window_size,
            breakers=breakers,
        )
        seed_state(self.state, seed)
        self.banned = token_ids("banned token ids", banned, vocab_size)
        self.adjusted = np.empty(vocab_size, dtype=np.float32)
        self.candidates = np.empty(vocab_size, dtype=[("logit", "f4"), ("token", "i4")])
        is_sorted_twice = acting["typical_p"] < 1.0 or mirostat == 1
        self.spare = np.empty(vocab_size if is_sorted_twice else 0, self.candidates.base.dtype)
        self.scattered = np.empty(vocab_size if chain else 0, np.float32)
        self.weights = np.empty(vocab_size, dtype=np.float64)
        self.shares = np.empty(vocab_size if self.adaptive.target >= 0.0 else 0, np.float64)

    def twin(self, int vocab_size):
        """A sampler that draws alike from the logits of a model of ``vocab_size`` tokens."""
        breakers = [each for each in self.options["breakers"] if max(each) < vocab_size]
        banned = [token for token in self.options["banned"] if token < vocab_size]
        return Sampler(vocab_size, **{**self.options, "breakers": breakers, "banned": banned})

    def follow(self, Sampler other not None) -> None:
        """Takes over the random state of ``other``, its recent tokens and what it has learnt.

        Raises ValueError where its options differ, or a recent token is outside the vocabulary.
        """
        cdef int i
        self.recent.follow(other.recent)
        self.mu, self.n_drawn_from = other.mu, 0
        self.adaptive.recent_sum = other.adaptive.recent_sum
        self.adaptive.recent_weight = other.adaptive.recent_weight
        for i in range(4):
            self.state[i] = other.state[i]

    def accept(self, int token) -> None:
        """Adds ``token`` to the recent ones, of which penalties look at the last.

        Mirostat learns from its surprise, and adaptive-p from its probability, if the latest
        ``sample`` could have drawn it.
        """
        if not 0 <= token < self.vocab_size:
            raise ValueError(f"token id {token} is outside the vocabulary of {self.vocab_size}")
        self.recent.accept(token)
        cdef Py_ssize_t i, n = self.n_drawn_from
        cdef double surprise
        self.n_drawn_from = 0
        for i in range(self.first_drawn, n):
            if self.candidates[i].token != token:
                continue
            if self.shares.shape[0]:
                note_drawn(&self.adaptive, self.shares[i])
            elif self.weights[i] > 0.0:
                surprise = log2(self.drawn_total / self.weights[i])
                self.mu -= self.mirostat_eta * (surprise - self.mirostat_tau)

    def sample(self, logits not None, const unsigned char[::1] mask=None) -> int:
        """Draws a token id from ``logits`` [vocab_size], float32.

        With ``mask`` only the tokens can be drawn whose bits are set: bit i % 8 of byte i // 8 is
        that of token i.
        """
        self._read(logits, mask)
        if self.is_greedy:
            return self._best_left()
        cdef Filters by = self.filters
        cdef Py_ssize_t i, first = 0
        cdef Py_ssize_t kept = self._run_chain(-1) if self.chain.shape[0] else self._filter()
        if by.xtc_probability > 0.0 and next_uniform(self.state) < by.xtc_probability:
            first = count_top_choices(&self.candidates[0], kept, by.xtc_threshold)
        cdef double total = self._weigh_drawn(first, kept)
        cdef double remaining = next_uniform(self.state) * total
        cdef bint learns = self.mirostat or self.shares.shape[0]
        self.first_drawn, self.n_drawn_from, self.drawn_total = first, kept if learns else 0, total
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
        if self.is_greedy:
            return np.array([self._best_left()], dtype=np.int32), np.ones(1)
        if self.chain.shape[0]:
            return self._chain_distribution()
        cdef Filters by = self.filters
        cdef Py_ssize_t kept = self._filter()
        cdef Py_ssize_t first = count_top_choices(&self.candidates[0], kept, by.xtc_threshold)
        cdef double total = self._weigh_drawn(0, kept)
        tokens = np.asarray(self.candidates[:kept])["token"].copy()
        probabilities = np.asarray(self.weights[:kept]) / total
        if by.xtc_probability > 0.0:
            probabilities *= 1.0 - by.xtc_probability
            total = self._weigh_drawn(first, kept)
            excluded = np.asarray(self.weights[first:kept]) / total
            probabilities[first:] += by.xtc_probability * excluded
        return tokens, probabilities

    def _chain_distribution(self):
        cdef double chance = self.chained.xtc_probability, share, total
        cdef Py_ssize_t kept, n_xtc = sum(op == XTC for op in self.chain)
        cdef long choices
        found = np.full(self.vocab_size, -1.0)  # of none
        for choices in range(1 << n_xtc):
            n_taken = choices.bit_count()
            share = chance**n_taken * (1.0 - chance) ** (n_xtc - n_taken)
            if share == 0.0:
                continue
            kept = self._run_chain(choices)
            total = self._weigh_drawn(0, kept)
            tokens = np.asarray(self.candidates[:kept])["token"]
            found[tokens] = np.maximum(found[tokens], 0.0)
            found[tokens] += share * np.asarray(self.weights[:kept]) / total
        order = np.argsort(-found, kind="stable")[: np.count_nonzero(found >= 0.0)]
        return order.astype(np.int32), found[order]

    cdef int _read(self, logits, const unsigned char[::1] mask) except -1:
        """Sets ``values``, what is drawn from: the logits or a copy that was changed; and ``best``.

        NumPy's argmax takes a tenth of the time of a loop here, and finds NaN before all else.
        """
        cdef const float[::1] given = logits
        self.n_drawn_from = 0
        if given.shape[0] != self.vocab_size:
            raise ValueError(f"expected {self.vocab_size} logits, got {given.shape[0]}")
        self.best = np.argmax(logits)
        if not given[self.best] <= FLT_MAX:
            raise ValueError(f"the logit of token {self.best} is {given[self.best]}")
        self.values = &given[0]
        cdef bint drops = self.filters.top_n_sigma > 0.0
        # Recent tokens are kept for penalties alone, which a chain has at their own place.
        cdef bint penalises = self.recent.n_kept > 0 and self.chain.shape[0] == 0
        if penalises or self.banned.shape[0] or mask is not None or drops:
            memcpy(&self.adjusted[0], &given[0], self.vocab_size * sizeof(float))
            if penalises:
                self.recent.penalise(self.values, &self.adjusted[0])
                self.recent.penalise_repetition(&self.adjusted[0])
            self._forbid(mask)
            self.values = &self.adjusted[0]
            self.best = np.argmax(self.adjusted.base)
            if drops:
                drop_unlikely(
                    &self.adjusted[0],
                    self.vocab_size,
                    self.values[self.best],
                    self.filters.top_n_sigma,
                )
        if self.values[self.best] == NEGATIVE_INFINITY:
            raise ValueError("every token is banned or has a logit of -inf")
        return 0

    cdef void _forbid(self, const unsigned char[::1] mask) noexcept:
        """Applies the bans and the mask to the copy."""
        cdef Py_ssize_t i
        for i in range(self.banned.shape[0]):
            self.adjusted[self.banned[i]] = NEGATIVE_INFINITY
        if mask is None:
            return
        cdef Py_ssize_t n_bits = min(8 * mask.shape[0], <Py_ssize_t> self.vocab_size)
        allow(&self.adjusted[0], self.vocab_size, &mask[0] if n_bits > 0 else NULL, n_bits)

    cdef int _best_left(self) noexcept:
        cdef Py_ssize_t i, kept
        if self.chain.shape[0] == 0:
            return self.best
        kept = self._run_chain(0)
        for i in range(1, kept):
            if is_worse(self.candidates[0], self.candidates[i]):
                self.candidates[0] = self.candidates[i]
        return self.candidates[0].token

    cdef Py_ssize_t _run_chain(self, long choices) noexcept:
        """As ``_filter``, in the order of ``chain``, the temperature included.

        Bits of ``choices`` say whether the first XTC, the second and so on acts; -1 draws them.
        """
        cdef Filters by = self.chained
        cdef Candidate* found = &self.candidates[0]
        cdef Py_ssize_t first, n_xtc = 0
        cdef Py_ssize_t used = take_above(self.values, self.vocab_size, NEGATIVE_INFINITY, found)
        cdef int32_t sampler
        cdef bint acts
        for sampler in self.chain:
            if sampler == PENALTIES or sampler == DRY:
                self._penalise_candidates(used, sampler)
            elif sampler == TOP_N_SIGMA:
                used = keep_near_best(found, used, by.top_n_sigma)
            elif sampler == TOP_K:
                used = keep_top_k(found, used, by.top_k)
            elif sampler == TYPICAL:
                used = keep_typical(found, &self.spare[0], used, by.typical_p)
            elif sampler == TOP_P:
                used = keep_top_p(found, used, by.top_p)
            elif sampler == MIN_P:
                used = keep_min_p(found, used, by.min_p)
            elif sampler == TEMPERATURE:
                cool(found, used, heat_of(found, used, by))
            else:
                if choices < 0:
                    acts = next_uniform(self.state) < by.xtc_probability
                else:
                    acts = choices >> n_xtc & 1
                n_xtc += 1
                if acts:
                    first = count_top_choices(found, used, by.xtc_threshold)
                    used -= first
                    memmove(found, found + first, used * sizeof(Candidate))
        return used

    cdef void _penalise_candidates(self, Py_ssize_t used, int32_t sampler) noexcept:
        """By a vocabulary in which others are -inf."""
        cdef Py_ssize_t i
        if self.recent.n_kept == 0:
            return
        for i in range(self.vocab_size):
            self.scattered[i] = NEGATIVE_INFINITY
        for i in range(used):
            self.scattered[self.candidates[i].token] = self.candidates[i].logit
        memcpy(&self.adjusted[0], &self.scattered[0], self.vocab_size * sizeof(float))
        if sampler == PENALTIES:
            self.recent.penalise(&self.scattered[0], &self.adjusted[0])
        else:
            self.recent.penalise_repetition(&self.adjusted[0])
        for i in range(used):
            self.candidates[i].logit = self.adjusted[self.candidates[i].token]

    cdef Py_ssize_t _filter(self) noexcept nogil:
        """Leaves the tokens that may be drawn in ``candidates``; returns their number."""
        cdef Py_ssize_t kept
        cdef Candidate* found = &self.candidates[0]
        cdef Candidate* spare = &self.spare[0] if self.spare.shape[0] else NULL
        cdef double best = self.values[self.best], total
        if self.mirostat == 1:
            return take_by_rank(
                self.values, self.vocab_size, self.filters.temperature, self.mu, found, spare
            )
        kept = take_filtered(self.values, self.vocab_size, best, self.filters, found, spare)
        if self.mirostat == 2:
            total = weigh(found, kept, self.filters, &self.weights[0])
            kept = keep_below_surprise(found, &self.weights[0], kept, total, self.mu)
        return kept

    cdef double _weigh_drawn(self, Py_ssize_t first, Py_ssize_t kept) noexcept nogil:
        """Fills ``weights`` from ``first`` on with what is drawn by; returns their sum."""
        cdef double* weights = &self.weights[first]
        cdef Py_ssize_t n = kept - first
        cdef double total = weigh(&self.candidates[first], n, self.filters, weights)
        if self.shares.shape[0]:
            total = weigh_near_target(self.adaptive, weights, &self.shares[first], n, total)
        return total
