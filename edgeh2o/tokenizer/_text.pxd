"""What the mergers share: the characters of UTF-8 text, and a seeded hash of it."""

from libc.stdint cimport uint64_t
from libc.string cimport memcpy


cdef extern from *:
    """
    static constexpr uint64_t HASH_MULTIPLIER = 0x9E3779B97F4A7C15u;
    """
    const uint64_t HASH_MULTIPLIER


cdef inline int character_length(char lead) noexcept nogil:
    """Bytes of the UTF-8 sequence that ``lead`` begins."""
    cdef unsigned char byte = <unsigned char>lead
    return 1 if byte < 0xC0 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4


cdef inline uint64_t hash_text(const char* text, Py_ssize_t length, uint64_t seed) noexcept nogil:
    """A hash of 44 bits."""
    cdef uint64_t value = seed
    cdef uint64_t word
    cdef Py_ssize_t at = 0
    while at < length:
        word = 0
        memcpy(&word, text + at, min(8, length - at))
        value = (value ^ word) * HASH_MULTIPLIER
        value ^= value >> 29
        at += 8
    return (value ^ <uint64_t>length) * HASH_MULTIPLIER >> 20
