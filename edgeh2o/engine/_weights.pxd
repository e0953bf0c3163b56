"""What tokens are drawn by: weights at their temperature, and adaptive-p, which changes them.

Adaptive-p, as llama.cpp has it, prefers what is about as likely as that it has to be for the
average of what was drawn to come near a target.
"""

from libc.math cimport exp, fabs

from edgeh2o.engine._candidates cimport Candidate, best_of, temperature_of
from edgeh2o.engine._filters cimport Filters


cdef struct Adaptive:
    double target  # off below 0
    double decay
    double recent_sum  # of probabilities that were drawn, the latest most
    double recent_weight


cdef inline Adaptive begin_adaptive(double target, double decay) noexcept nogil:
    """One that has drawn as if its target had been met."""
    cdef double weight = 1.0 / (1.0 - decay)
    return Adaptive(target, decay, target * weight, weight)


cdef inline void note_drawn(Adaptive* adaptive, double share) noexcept nogil:
    """A token of that probability was drawn."""
    adaptive.recent_sum = share + adaptive.decay * adaptive.recent_sum
    adaptive.recent_weight = 1.0 + adaptive.decay * adaptive.recent_weight


cdef inline double heat_of(
    const Candidate* found, Py_ssize_t size, const Filters& by
) noexcept nogil:
    """The temperature of what is drawn from."""
    return temperature_of(found, size, by.temperature, by.dynatemp_range, by.dynatemp_exponent)


cdef inline double weigh(
    const Candidate* found, Py_ssize_t size, const Filters& by, double* weights
) noexcept nogil:
    """Fills ``weights`` [size] with exp((logit - best) / temperature); returns their sum."""
    cdef double best = best_of(found, size), total = 0.0
    cdef double temperature = heat_of(found, size, by)
    cdef Py_ssize_t i
    for i in range(size):
        weights[i] = exp((found[i].logit - best) / temperature)
        total += weights[i]
    return total


cdef inline double weigh_near_target(
    const Adaptive& adaptive, double* weights, double* shares, Py_ssize_t size, double total
) noexcept nogil:
    """Puts in the place of ``weights`` [size], whose sum is ``total``, those of adaptive-p.

    Returns their sum; ``shares`` [size] are then the probabilities that there were.
    """
    cdef double width = 0.3, sharpness = 10.0, away
    cdef double aim = 2.0 * adaptive.target - adaptive.recent_sum / adaptive.recent_weight
    cdef Py_ssize_t i
    aim = min(max(aim, 0.0), 1.0)
    for i in range(size):
        shares[i] = weights[i] / total
    total = 0.0
    for i in range(size):
        away = fabs(shares[i] - aim) / width
        weights[i] = exp(-sharpness * away * away / (1.0 + away))
        total += weights[i]
    return total
