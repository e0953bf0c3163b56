"""Random numbers of a seed: xoshiro256** (D. Blackman and S. Vigna, 2018)."""

from libc.stdint cimport uint64_t


cdef inline uint64_t rotate_left(uint64_t value, int bits) noexcept nogil:
    return (value << bits) | (value >> (64 - bits))


cdef inline void seed_state(uint64_t* state, uint64_t seed) noexcept nogil:
    """Fills state [4] by SplitMix64, as its authors advise."""
    cdef uint64_t mixed
    cdef int i
    for i in range(4):
        seed += <uint64_t> 0x9E3779B97F4A7C15
        mixed = seed
        mixed = (mixed ^ (mixed >> 30)) * <uint64_t> 0xBF58476D1CE4E5B9
        mixed = (mixed ^ (mixed >> 27)) * <uint64_t> 0x94D049BB133111EB
        state[i] = mixed ^ (mixed >> 31)


cdef inline double next_uniform(uint64_t* state) noexcept nogil:
    """The next double in [0, 1), 53 bits."""
    cdef uint64_t result = rotate_left(state[1] * 5, 7) * 9
    cdef uint64_t shifted = state[1] << 17
    state[2] ^= state[0]
    state[3] ^= state[1]
    state[1] ^= state[2]
    state[0] ^= state[3]
    state[2] ^= shifted
    state[3] = rotate_left(state[3], 45)
    return <double> (result >> 11) * (1.0 / 9007199254740992.0)
