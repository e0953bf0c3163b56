"""See ``_recent_tokens.pyx``."""

from libc.stdint cimport int32_t

from edgeh2o.engine._repetition cimport DryPenalty


cdef class RecentTokens:
    cdef int vocab_size
    cdef double repeat_penalty
    cdef DryPenalty dry
    cdef Py_ssize_t window_size
    cdef readonly Py_ssize_t dry_window_size
    cdef readonly Py_ssize_t n_kept
    cdef int32_t[::1] tokens  # the last half of it at least counts
    cdef unsigned char[::1] begins_breaker
    cdef int32_t[::1] longer_breakers
    cdef int32_t[::1] breaker_ends
    cdef int32_t[::1] repeats
    cdef int32_t[::1] longest

    cdef void follow(self, RecentTokens other) except *
    cdef void accept(self, int32_t token) noexcept
    cdef void penalise(self, const float* logits, float* adjusted) noexcept
    cdef void penalise_repetition(self, float* logits) noexcept
