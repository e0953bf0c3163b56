"""Tokens that may be drawn, with their logits: their order, and what filters leave of them."""

from libc.math cimport exp, fabs, fmax, log, pow
from libc.stdint cimport int32_t
from libc.string cimport memcpy


cdef enum:
    BLOCK = 64


cdef inline bint has_above(const float* values, float floor) noexcept nogil:
    """Whether one of values [BLOCK] is larger: in vectors, as none waits for the one before."""
    cdef int32_t n = 0
    cdef int i
    for i in range(BLOCK):
        n += values[i] > floor
    return n > 0


cdef struct Candidate:
    float logit
    int32_t token


cdef inline bint is_worse(Candidate a, Candidate b) noexcept nogil:
    """A total order: the lower logit is worse, then the higher token id."""
    return a.logit < b.logit or (a.logit == b.logit and a.token > b.token)


cdef inline void sift_down(Candidate* heap, Py_ssize_t root, Py_ssize_t size) noexcept nogil:
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


cdef inline void make_heap(Candidate* heap, Py_ssize_t size) noexcept nogil:
    cdef Py_ssize_t root
    for root in range(size // 2 - 1, -1, -1):
        sift_down(heap, root, size)


cdef inline void sort_best_first(Candidate* candidates, Py_ssize_t size) noexcept nogil:
    cdef Py_ssize_t last
    cdef Candidate worst
    make_heap(candidates, size)
    for last in range(size - 1, 0, -1):
        worst = candidates[0]
        candidates[0] = candidates[last]
        candidates[last] = worst
        sift_down(candidates, 0, last)


cdef inline double best_of(const Candidate* candidates, Py_ssize_t size) noexcept nogil:
    cdef double best = candidates[0].logit
    cdef Py_ssize_t i
    for i in range(1, size):
        best = fmax(best, candidates[i].logit)
    return best


cdef inline double sum_of(const Candidate* candidates, Py_ssize_t size, double best) noexcept nogil:
    """Sum of exp(logit - best)."""
    cdef double total = 0.0
    cdef Py_ssize_t i
    for i in range(size):
        total += exp(candidates[i].logit - best)
    return total


cdef inline double entropy_of(
    const Candidate* candidates, Py_ssize_t size, double best, double total
) noexcept nogil:
    """Of the softmax, in nats: log(total) - E[logit - best]; ``total`` is ``sum_of``."""
    cdef double mean = 0.0
    cdef Py_ssize_t i
    for i in range(size):
        mean += exp(candidates[i].logit - best) * (candidates[i].logit - best)
    return log(total) - mean / total


cdef inline Py_ssize_t keep_typical(
    Candidate* candidates, Candidate* spare, Py_ssize_t size, double share
) noexcept nogil:
    """Leaves those whose surprise is nearest to the entropy, until they have more than ``share``.

    Locally typical sampling (C. Meister et al., 2023). ``spare`` has room for ``size`` of them.
    Returns how many are left, one at least.
    """
    cdef double best = best_of(candidates, size)
    cdef double total = sum_of(candidates, size, best)
    cdef double entropy = entropy_of(candidates, size, best, total)
    cdef double mass = 0.0
    cdef Py_ssize_t i, kept = 0
    for i in range(size):
        spare[i].logit = -<float> fabs(log(total) - (candidates[i].logit - best) - entropy)
        spare[i].token = <int32_t> i
    sort_best_first(spare, size)
    while kept < size and mass <= share * total:
        spare[kept] = candidates[spare[kept].token]
        mass += exp(spare[kept].logit - best)
        kept += 1
    memcpy(candidates, spare, kept * sizeof(Candidate))
    return kept


cdef inline Py_ssize_t count_top_choices(
    Candidate* candidates, Py_ssize_t size, double threshold
) noexcept nogil:
    """Sorts them; returns how many of the likeliest there are before the last that has at least
    the probability ``threshold``: what XTC, "exclude top choices", leaves out.
    """
    cdef double best, total
    cdef Py_ssize_t n = 0
    sort_best_first(candidates, size)
    best = candidates[0].logit
    total = sum_of(candidates, size, best)
    while n < size and exp(candidates[n].logit - best) >= threshold * total:
        n += 1
    return n - 1 if n > 0 else 0


cdef inline double temperature_of(
    const Candidate* candidates, Py_ssize_t size, double middle, double reach, double exponent
) noexcept nogil:
    """A temperature within ``reach`` of ``middle``: the higher, the nearer the entropy is to that
    of equal probabilities.
    """
    cdef double best, total, low, evenness
    if reach <= 0.0 or size < 2:
        return middle
    best = best_of(candidates, size)
    total = sum_of(candidates, size, best)
    evenness = entropy_of(candidates, size, best, total) / log(<double> size)
    low = fmax(0.0, middle - reach)
    # Of zero the best is left alone, without a division by it.
    return fmax(low + (middle + reach - low) * pow(fmax(evenness, 0.0), exponent), 1e-30)
