"""DRY, "don't repeat yourself": tokens that would go on with a repetition lose by its length."""

from libc.float cimport FLT_MAX
from libc.math cimport INFINITY, fmax, fmin, log, pow
from libc.stdint cimport int32_t


cdef struct DryPenalty:
    double multiplier
    double base
    Py_ssize_t allowed_length


# Sequences of tokens that no repetition goes over. ``begins`` [vocabulary] has bit 1 of tokens that
# are one, and bit 2 of those that begin one of ``n_longer``, which stand behind each other in
# ``longer``, up to their ``ends``.
cdef struct Breakers:
    const unsigned char* begins
    const int32_t* longer
    const int32_t* ends
    Py_ssize_t n_longer


cdef inline void penalise_repetition(
    float* logits,
    const int32_t* tokens,
    Py_ssize_t n,
    DryPenalty dry,
    Breakers breakers,
    int32_t* repeats,
    int32_t* longest,
) noexcept nogil:
    """logits[t] -= multiplier * base^(m - allowed length), for every t that can go on.

    That is, which stood in ``tokens`` [n] behind m of them that are also the last ones; m is the
    largest of its places, and at least the allowed length. Breakers of one token lose nothing.
    ``repeats`` has room for n numbers; ``longest`` [vocabulary] is zero, before and after.
    """
    cdef double value, most = log(FLT_MAX) / log(dry.base) if dry.base > 1.000001 else 0.0
    cdef Py_ssize_t i, length, limit
    cdef int32_t token
    if n <= dry.allowed_length:
        return
    limit = count_since_breaker(tokens, n, breakers)
    if limit < dry.allowed_length:
        return
    count_repeats(tokens, n, repeats)
    for i in range(n - 1):
        length = min(<Py_ssize_t> repeats[i], limit)
        if length >= dry.allowed_length:
            token = tokens[i + 1]
            longest[token] = max(longest[token], <int32_t> length + 1)  # 0 is none
    for i in range(1, n):
        token = tokens[i]
        length = longest[token] - 1
        longest[token] = 0
        if length < 0 or breakers.begins[token] & 1 or logits[token] == -INFINITY:
            continue
        value = dry.multiplier * pow(dry.base, fmin(<double> (length - dry.allowed_length), most))
        logits[token] = <float> fmin(fmax(logits[token] - value, -FLT_MAX), FLT_MAX)


cdef inline Py_ssize_t count_since_breaker(
    const int32_t* tokens, Py_ssize_t n, Breakers breakers
) noexcept nogil:
    """Tokens behind the last breaker in ``tokens`` [n]; n without one."""
    cdef Py_ssize_t behind, k, first, length, longest
    cdef int32_t token
    for behind in range(n):
        token = tokens[n - 1 - behind]
        if not breakers.begins[token]:
            continue
        longest = breakers.begins[token] & 1
        first = 0
        for k in range(breakers.n_longer):
            length = breakers.ends[k] - first
            if longest < length <= behind + 1 and is_at(
                &tokens[n - 1 - behind], &breakers.longer[first], length
            ):
                longest = length
            first = breakers.ends[k]
        if longest:
            return behind + 1 - longest
    return n


cdef inline bint is_at(const int32_t* tokens, const int32_t* wanted, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(n):
        if tokens[i] != wanted[i]:
            return False
    return True


cdef inline void count_repeats(
    const int32_t* tokens, Py_ssize_t n, int32_t* repeats
) noexcept nogil:
    """repeats[i], i < n: how many tokens that end with tokens[i] are the last ones too.

    In O(n) steps: the Z algorithm from the end (D. Gusfield, "Algorithms on Strings, Trees, and
    Sequences", 1997, 1.4).
    """
    cdef Py_ssize_t last = n - 1, left = 0, right = 0, k, length
    repeats[last] = <int32_t> n
    for k in range(1, n):  # how far before the end
        length = 0
        if k < right:
            length = min(<Py_ssize_t> repeats[last - (k - left)], right - k)
        while k + length < n and tokens[last - length] == tokens[last - k - length]:
            length += 1
        if k + length > right:
            left, right = k, k + length
        repeats[last - k] = <int32_t> length
