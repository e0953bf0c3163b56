// The host's half of cuda/kernels/warp.h, for threads that run in a Block. What a GPU would not do (addresses
// that are not aligned, lanes that do not meet) ends the kernel with an error.
#pragma once

#include <cmath>
#include <cstring>

#include "base/half.h"
#include "cuda/host/block.h"

#define EH2O_DEVICE inline
#define EH2O_KERNEL(name, Arguments, n_threads) inline void name(const Arguments a)
#define EH2O_KERNEL_OF(name, Arguments, n_threads, n_blocks) inline void name(const Arguments a)
#define EH2O_UNROLL
#define EH2O_UNROLL_4
#define EH2O_NO_UNROLL
#define EH2O_SHARED_MEMORY uint8_t* const shared_memory = ::edgeh2o::cuda::host::current_block->shared()

namespace edgeh2o::cuda {

inline int thread_index() { return static_cast<int>(host::current_block->thread()); }
inline int block_x() { return static_cast<int>(host::current_block->index().x); }
inline int block_y() { return static_cast<int>(host::current_block->index().y); }
inline int block_z() { return static_cast<int>(host::current_block->index().z); }
inline void sync_block() { host::current_block->wait(host::Lane::State::kAtBarrier); }

inline uint32_t bits_of_float(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float float_of_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline float multiply_add(float a, float b, float c) { return std::fma(a, b, c); }
inline float divide(float a, float b) { return a / b; }
inline float square_root(float x) { return std::sqrt(x); }
inline float larger(float a, float b) { return std::fmax(a, b); }
inline float magnitude(float x) { return std::fabs(x); }
inline int32_t round_to_int(float x) { return static_cast<int32_t>(std::lrint(x)); }
inline float exp2_fast(float x) { return std::exp2(x); }

inline uint32_t pack_halves(float low, float high) {
  return f16_from_f32(low) | static_cast<uint32_t>(f16_from_f32(high)) << 16;
}
inline int32_t dot4(uint32_t a, uint32_t b, int32_t acc) {
  for (int i = 0; i < 4; ++i) {
    acc += static_cast<int8_t>(a >> (8 * i)) * static_cast<int8_t>(b >> (8 * i));
  }
  return acc;
}

namespace host {

inline void meet(Collective collective) {
  current_block->lane().collective = collective;
  current_block->wait(Lane::State::kAtCollective);
}

inline void check_aligned(const void* p, size_t n_bytes, const char* what) {
  if (reinterpret_cast<uintptr_t>(p) % n_bytes != 0) {
    current_block->fail(std::string(what) + " is not aligned");
  }
}

template <typename T>
T load_aligned(const void* p) {
  check_aligned(p, sizeof(T), "a load");
  T value;
  std::memcpy(&value, p, sizeof(T));
  return value;
}

}  // namespace host

inline void sync_warp() { host::meet(host::Collective::kSyncWarp); }

inline uint32_t shuffle_xor(uint32_t value, int mask) {
  host::Lane& lane = host::current_block->lane();
  if (mask < 0 || mask >= kWarpSize) host::current_block->fail("a shuffle leaves the warp");
  lane.in[0] = value;
  lane.in[1] = static_cast<uint32_t>(mask);
  host::meet(host::Collective::kShuffleXor);
  return lane.out[0];
}

inline Words4 load_constant16(const void* p) { return host::load_aligned<Words4>(p); }
inline Words2 load_constant8(const void* p) { return host::load_aligned<Words2>(p); }
inline uint32_t load_constant4(const void* p) { return host::load_aligned<uint32_t>(p); }

namespace host {

inline void copy_async(void* shared, const void* global, size_t n_bytes) {
  check_aligned(shared, n_bytes, "the target of cp.async");
  check_aligned(global, n_bytes, "the source of cp.async");
  std::memcpy(shared, global, n_bytes);  // it must be readable now
  std::memset(shared, 0x7f, n_bytes);    // garbage until its group was waited for
  poison(shared, n_bytes);
  current_block->lane().copies.push_back(
      {static_cast<uint8_t*>(shared), static_cast<const uint8_t*>(global), n_bytes});
}

}  // namespace host

inline void copy_async16(void* shared, const void* global) { host::copy_async(shared, global, 16); }
inline void copy_async8(void* shared, const void* global) { host::copy_async(shared, global, 8); }
inline void copy_async_commit() {
  host::Lane& lane = host::current_block->lane();
  lane.committed.push_back(lane.copies.size());
}
template <int kPending>
void copy_async_wait() {
  host::Lane& lane = host::current_block->lane();
  if (lane.committed.size() <= kPending) return;
  const size_t n_groups = lane.committed.size() - kPending, n_copies = lane.committed[n_groups - 1];
  for (size_t i = 0; i < n_copies; ++i) {
    const auto& copy = lane.copies[i];
    host::unpoison(copy.to, copy.n_bytes);
    std::memcpy(copy.to, copy.from, copy.n_bytes);
  }
  lane.copies.erase(lane.copies.begin(), lane.copies.begin() + static_cast<ptrdiff_t>(n_copies));
  lane.committed.erase(lane.committed.begin(), lane.committed.begin() + static_cast<ptrdiff_t>(n_groups));
  for (size_t& n : lane.committed) n -= n_copies;
}

inline void load_matrix4(uint32_t (&r)[4], const void* row) {
  host::Lane& lane = host::current_block->lane();
  lane.row = row;
  host::meet(host::Collective::kLoadMatrix);
  std::memcpy(r, lane.out, sizeof(r));
}
inline void load_matrix4_transposed(uint32_t (&r)[4], const void* row) {
  host::Lane& lane = host::current_block->lane();
  lane.row = row;
  host::meet(host::Collective::kLoadMatrixTransposed);
  std::memcpy(r, lane.out, sizeof(r));
}

namespace host {

template <typename T>
void multiply(Collective collective, T (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  Lane& lane = current_block->lane();
  std::memcpy(lane.in, a, sizeof(a));
  lane.in[4] = b0;
  lane.in[5] = b1;
  std::memcpy(lane.in + 6, d, sizeof(d));
  meet(collective);
  std::memcpy(d, lane.out, sizeof(d));
}

}  // namespace host

inline void mma_s8(int32_t (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, int32_t c) {
  for (int32_t& sum : d) sum = c;
  host::multiply(host::Collective::kMmaS8, d, a, b0, b1);
}
inline void mma_s8_half(int32_t (&d)[4], uint32_t a0, uint32_t a1, uint32_t b, int32_t c) {
  const uint32_t a[4] = {a0, a1, 0, 0};
  mma_s8(d, a, b, 0, c);
}
inline void mma_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  host::multiply(host::Collective::kMmaF16, d, a, b0, b1);
}

}  // namespace edgeh2o::cuda
