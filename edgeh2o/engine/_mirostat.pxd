"""Mirostat: which tokens leave the surprise of a text near a target.

S. Basu et al., "Mirostat: A Neural Text Decoding Algorithm that Directly Controls Perplexity",
2021; version 2 as llama.cpp has it. Surprise is in bits.
"""

cimport cython
from libc.math cimport INFINITY, exp2, log, pow

from edgeh2o.engine._candidates cimport Candidate, is_worse, sort_best_first
from edgeh2o.engine._filters cimport take_above, take_top_k

cdef enum:
    N_OF_SLOPE = 100  # likeliest tokens that the exponent of Zipf's law is estimated from


@cython.cdivision(True)  # of zero too: infinite, or no number
cdef inline Py_ssize_t take_by_rank(
    const float* values,
    Py_ssize_t size,
    double temperature,
    double mu,
    Candidate* found,
    Candidate* spare,
) noexcept nogil:
    """Version 1: as many of the likeliest tokens as have about the surprise ``mu`` at most.

    Probabilities are taken to fall as rank^-s, with s by least squares. ``spare`` has room for
    ``N_OF_SLOPE``. They are found in the order of their ids: a token more or less, by a little
    difference of the logits, seldom changes a draw, so that a draft model guesses it.
    """
    cdef Candidate worst
    cdef Py_ssize_t i, kept = 0
    cdef Py_ssize_t n = take_top_k(values, size, min(size, <Py_ssize_t> N_OF_SLOPE), spare)
    cdef double sum_tb = 0.0, sum_tt = 0.0, t, s, rest, k
    sort_best_first(spare, n)
    for i in range(n - 1):
        t = log((i + 2.0) / (i + 1.0))
        sum_tb += t * (spare[i].logit - spare[i + 1].logit) / temperature
        sum_tt += t * t
    s = sum_tb / sum_tt
    rest = s - 1.0
    k = pow(rest * exp2(mu) / (1.0 - pow(<double> size, -rest)), 1.0 / s)
    if k >= size:
        return take_above(values, size, -INFINITY, found)
    # One also where there is no such number.
    take_top_k(values, size, <Py_ssize_t> k if k >= 1.0 else 1, found)
    worst = found[0]
    n = take_above(values, size, worst.logit, found)
    for i in range(n):
        found[kept] = found[i]
        kept += not is_worse(found[i], worst)
    return kept


cdef inline Py_ssize_t keep_below_surprise(
    Candidate* candidates, const double* weights, Py_ssize_t size, double total, double mu
) noexcept nogil:
    """Version 2: tokens that have the surprise ``mu`` at most, the likeliest in any case.

    ``weights`` [size], of sum ``total``, are in the ratio of the probabilities.
    """
    cdef double floor = total * exp2(-mu)
    cdef Py_ssize_t i, best = 0, kept = 0
    for i in range(1, size):
        best = i if weights[i] > weights[best] else best
    if weights[best] < floor:
        candidates[0] = candidates[best]
        return 1
    for i in range(size):
        if weights[i] >= floor:
            candidates[kept] = candidates[i]
            kept += 1
    return kept
