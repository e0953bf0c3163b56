// Compile-time loop and choice. Included inside an ISA namespace by the simd headers only, through EH2O_ISA.
#ifndef EH2O_ISA
#error "simd headers are included by isa/*.cc, which define EH2O_ISA"
#endif

#include <cstddef>
#include <utility>

#define EH2O_INLINE inline __attribute__((always_inline))
#define EH2O_INLINE_LAMBDA __attribute__((always_inline))  // for large ones that are called at several places

// A loop over registers whose index need not be a constant expression. Each instance of unroll()'s lambda is
// a function to the compiler: with these loops a set of kernels compiles in half the time.
#define EH2O_UNROLL_FOR(i, n) _Pragma("GCC unroll 64") for (size_t i = 0; i < (n); ++i)

namespace edgeh2o::EH2O_ISA::simd {

template <size_t I>
using Index = std::integral_constant<size_t, I>;

template <typename F, size_t... I>
EH2O_INLINE void unroll_impl(const F& f, std::index_sequence<I...>) {
  (f(Index<I>{}), ...);
}

// Calls f(Index<0>), ..., f(Index<N-1>): the argument is usable as a constant (lane number, array index).
template <size_t N, typename F>
EH2O_INLINE void unroll(const F& f) {
  unroll_impl(f, std::make_index_sequence<N>{});
}

// Calls f(Index<n>) for n in 1 to kMax, and nothing for another.
template <size_t kMax, typename F>
EH2O_INLINE void with_constant(size_t n, const F& f) {
  unroll<kMax>([&](auto i) {
    if (n == i + 1) f(Index<i + 1>{});
  });
}

}  // namespace edgeh2o::EH2O_ISA::simd
