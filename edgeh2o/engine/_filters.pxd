"""Filters by themselves, each of which sees what the one before left: see ``_sampler``."""

from libc.float cimport FLT_MAX
from libc.math cimport INFINITY, exp, fmax, fmin, log, sqrt
from libc.stdint cimport int32_t

from edgeh2o.engine._candidates cimport (
    BLOCK,
    Candidate,
    best_of,
    has_above,
    is_worse,
    keep_typical,
    make_heap,
    sift_down,
    sort_best_first,
    sum_of,
)


cdef struct Filters:
    double temperature
    double dynatemp_range
    double dynatemp_exponent
    double top_n_sigma
    double top_p
    double min_p
    double typical_p
    double xtc_probability
    double xtc_threshold
    Py_ssize_t top_k  # the vocabulary, where it is off


cdef inline Py_ssize_t take_above(
    const float* values, Py_ssize_t size, double floor, Candidate* found
) noexcept nogil:
    """Collects the tokens whose logit is ``floor`` at least, but those of -inf."""
    cdef Py_ssize_t i, used = 0
    for i in range(size):  # without branches: -inf may be anywhere
        found[used].logit = values[i]
        found[used].token = <int32_t> i
        used += (values[i] >= floor) & (values[i] > -INFINITY)
    return used


cdef inline Py_ssize_t take_top_k(
    const float* values, Py_ssize_t size, Py_ssize_t k, Candidate* heap
) noexcept nogil:
    """Collects the ``k`` best tokens in one pass over a heap of that size."""
    cdef Py_ssize_t i = 0, used = 0, end
    while i < size and used < k:
        heap[used].logit = values[i]
        heap[used].token = <int32_t> i
        used += values[i] > -INFINITY
        i += 1
    make_heap(heap, used)
    while i < size:
        end = min(i + BLOCK, size)
        if end < i + BLOCK or has_above(&values[i], heap[0].logit):
            for i in range(i, end):
                if values[i] > heap[0].logit:
                    heap[0].logit = values[i]
                    heap[0].token = <int32_t> i
                    sift_down(heap, 0, used)
        i = end
    return used


cdef inline double top_p_floor(
    double best, double total, Py_ssize_t size, double share
) noexcept nogil:
    """Below this logit is none of the most likely of ``size`` tokens that reach ``share``.

    Those whose probability is below ``(1 - share) / size`` weigh less than ``1 - share`` together,
    so the others reach it; few are left to sort.
    """
    return best + log((1.0 - share) / size * total) - 1e-6


cdef inline Py_ssize_t keep_above(
    Candidate* candidates, Py_ssize_t size, double floor
) noexcept nogil:
    cdef Py_ssize_t i, kept = 0
    for i in range(size):
        candidates[kept] = candidates[i]
        kept += candidates[i].logit >= floor
    return kept


cdef inline Py_ssize_t keep_top_k(
    Candidate* candidates, Py_ssize_t size, Py_ssize_t k
) noexcept nogil:
    cdef Py_ssize_t i
    if k >= size:
        return size
    make_heap(candidates, k)
    for i in range(k, size):
        if is_worse(candidates[0], candidates[i]):
            candidates[0] = candidates[i]
            sift_down(candidates, 0, k)
    return k


cdef inline Py_ssize_t keep_top_p(
    Candidate* candidates, Py_ssize_t size, double share
) noexcept nogil:
    """Leaves the most likely, until they have ``share`` of the probability."""
    cdef double best = best_of(candidates, size)
    cdef double total = sum_of(candidates, size, best), mass = 0.0
    cdef Py_ssize_t kept = 0
    size = keep_above(candidates, size, top_p_floor(best, total, size, share))
    sort_best_first(candidates, size)
    while kept < size and mass < share * total:
        mass += exp(candidates[kept].logit - best)
        kept += 1
    return kept


cdef inline Py_ssize_t keep_min_p(
    Candidate* candidates, Py_ssize_t size, double share
) noexcept nogil:
    return keep_above(candidates, size, best_of(candidates, size) + log(share))


cdef inline Py_ssize_t keep_near_best(
    Candidate* candidates, Py_ssize_t size, double n_sigma
) noexcept nogil:
    """Leaves logits down to so many standard deviations below the best."""
    cdef double mean = 0.0, variance = 0.0
    cdef Py_ssize_t i
    for i in range(size):
        mean += candidates[i].logit
    mean /= size
    for i in range(size):
        variance += (candidates[i].logit - mean) * (candidates[i].logit - mean)
    return keep_above(candidates, size, best_of(candidates, size) - n_sigma * sqrt(variance / size))


cdef inline void cool(Candidate* candidates, Py_ssize_t size, double temperature) noexcept nogil:
    """Divides the logits, which stay finite."""
    cdef double value
    cdef Py_ssize_t i
    temperature = fmax(temperature, 1e-30)
    for i in range(size):
        value = candidates[i].logit / temperature
        candidates[i].logit = <float> fmin(fmax(value, -FLT_MAX), FLT_MAX)


cdef inline void allow(
    float* logits, Py_ssize_t size, const unsigned char* bits, Py_ssize_t n_bits
) noexcept nogil:
    """Leaves the tokens whose bits are set."""
    cdef Py_ssize_t i
    cdef float nothing = -INFINITY
    for i in range(n_bits):
        logits[i] = logits[i] if bits[i >> 3] >> (i & 7) & 1 else nothing
    for i in range(n_bits, size):
        logits[i] = nothing


cdef inline void drop_unlikely(
    float* logits, Py_ssize_t size, double best, double n_sigma
) noexcept nogil:
    """Leaves logits down to so many standard deviations below the best; others become -inf."""
    cdef double mean = 0.0, variance = 0.0, floor
    cdef Py_ssize_t i, n = 0
    for i in range(size):
        if logits[i] > -INFINITY:
            mean += logits[i]
            n += 1
    mean /= n
    for i in range(size):
        if logits[i] > -INFINITY:
            variance += (logits[i] - mean) * (logits[i] - mean)
    floor = best - n_sigma * sqrt(variance / n)
    for i in range(size):
        if logits[i] < floor:
            logits[i] = -INFINITY


cdef inline Py_ssize_t take_filtered(
    const float* values,
    Py_ssize_t size,
    double best,
    Filters by,
    Candidate* found,
    Candidate* spare,
) noexcept nogil:
    """Collects what top-k, typical, top-p and min-p leave, in that order; ``best`` is a logit."""
    cdef double share_of_best, total = 0.0, mass = 0.0
    cdef Py_ssize_t i, used, kept = 0
    if by.top_k < size:
        used = take_top_k(values, size, by.top_k, found)
    else:
        if by.top_p < 1.0 and by.typical_p >= 1.0:
            for i in range(size):
                total += exp(values[i] - best)
        used = take_above(values, size, lowest_kept(best, total, size, by), found)
    if by.typical_p < 1.0:
        used = keep_typical(found, spare, used, by.typical_p)
        best = best_of(found, used)
    if by.top_k < size or by.typical_p < 1.0:
        total = sum_of(found, used, best)
    if by.top_p < 1.0:
        sort_best_first(found, used)
    elif by.min_p <= 0.0:
        return used
    for i in range(used):
        if by.top_p < 1.0 and mass >= by.top_p * total:
            break
        share_of_best = exp(found[i].logit - best)
        mass += share_of_best
        if share_of_best >= by.min_p:
            found[kept] = found[i]
            kept += 1
    return kept


cdef inline double lowest_kept(
    double best, double total, Py_ssize_t size, Filters by
) noexcept nogil:
    """Below this logit top-p and min-p keep none; typical ones are chosen before, among all."""
    cdef double floor = -INFINITY
    if by.typical_p < 1.0:
        return floor
    if by.min_p > 0.0:
        floor = best + log(by.min_p) - 1e-6
    if by.top_p < 1.0:
        floor = fmax(floor, top_p_floor(best, total, size, by.top_p))
    return floor
