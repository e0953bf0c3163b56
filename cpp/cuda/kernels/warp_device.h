// The device's half of cuda/kernels/warp.h: instructions of sm_80 and later, PTX ISA 7.0.
#pragma once

#define EH2O_DEVICE __device__ __forceinline__
#define EH2O_KERNEL(name, Arguments, n_threads) \
  extern "C" __global__ void __launch_bounds__(n_threads) name(const Arguments a)
// With registers for so many blocks of a processor.
#define EH2O_KERNEL_OF(name, Arguments, n_threads, n_blocks) \
  extern "C" __global__ void __launch_bounds__(n_threads, n_blocks) name(const Arguments a)
// For loops whose counter is the index of an array in registers.
#define EH2O_UNROLL _Pragma("unroll")
#define EH2O_UNROLL_4 _Pragma("unroll 4")   // so that loads of several rounds are on their way
#define EH2O_NO_UNROLL _Pragma("unroll 1")  // to save registers
#define EH2O_SHARED_MEMORY uint8_t* const shared_memory = dynamic_shared_memory

namespace edgeh2o::cuda {

extern __shared__ __align__(16) uint8_t dynamic_shared_memory[];

EH2O_DEVICE int thread_index() { return static_cast<int>(threadIdx.x); }
EH2O_DEVICE int block_x() { return static_cast<int>(blockIdx.x); }
EH2O_DEVICE int block_y() { return static_cast<int>(blockIdx.y); }
EH2O_DEVICE int block_z() { return static_cast<int>(blockIdx.z); }
EH2O_DEVICE void sync_block() { __syncthreads(); }
EH2O_DEVICE void sync_warp() { __syncwarp(); }

EH2O_DEVICE uint32_t bits_of_float(float x) { return __float_as_uint(x); }
EH2O_DEVICE float float_of_bits(uint32_t bits) { return __uint_as_float(bits); }
EH2O_DEVICE float multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
EH2O_DEVICE float divide(float a, float b) { return __fdiv_rn(a, b); }
EH2O_DEVICE float square_root(float x) { return __fsqrt_rn(x); }
EH2O_DEVICE float larger(float a, float b) { return fmaxf(a, b); }
EH2O_DEVICE float magnitude(float x) { return fabsf(x); }
EH2O_DEVICE int32_t round_to_int(float x) { return __float2int_rn(x); }
EH2O_DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
EH2O_DEVICE float f32_from_f16(uint16_t half) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(half));
  return x;
}
EH2O_DEVICE uint16_t f16_from_f32(float x) {
  uint16_t half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(x));
  return half;
}
// Two halves, the first in the low bits.
EH2O_DEVICE uint32_t pack_halves(float low, float high) {
  uint32_t halves;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(halves) : "f"(high), "f"(low));
  return halves;
}

// acc plus the products of four signed bytes.
EH2O_DEVICE int32_t dot4(uint32_t a, uint32_t b, int32_t acc) {
  int32_t sum;
  asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(acc));
  return sum;
}

EH2O_DEVICE uint32_t shuffle_xor(uint32_t value, int mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}

// From memory that no thread of the kernel writes; aligned to its size.
EH2O_DEVICE Words4 load_constant16(const void* p) {
  Words4 v;
  asm("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
EH2O_DEVICE Words2 load_constant8(const void* p) {
  Words2 v;
  asm("ld.global.nc.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}
EH2O_DEVICE uint32_t load_constant4(const void* p) {
  uint32_t v;
  asm("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}

EH2O_DEVICE uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
// Copies 16 or 8 bytes to shared memory; they are there once this thread has waited for their group.
EH2O_DEVICE void copy_async16(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global));
}
EH2O_DEVICE void copy_async8(void* shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared_address(shared)), "l"(global));
}
EH2O_DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;"); }
// Until at most kPending groups of this thread are on their way.
template <int kPending>
EH2O_DEVICE void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending));
}

// Four matrices of 8 x 8 halves, of which lane l names row l % 8 of matrix l / 8; each lane gets the pair
// (l / 4, l % 4) of every one.
EH2O_DEVICE void load_matrix4(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row)));
}
EH2O_DEVICE void load_matrix4_transposed(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row)));
}

// d = a b + c of 16 x 32 and 32 x 8 signed bytes, c everywhere.
EH2O_DEVICE void mma_s8(int32_t (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, int32_t c) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%10,%10,%10,%10};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c));
}
// The same of 16 x 16 and 16 x 8: the first or the second half of the depth of mma_s8.
EH2O_DEVICE void mma_s8_half(int32_t (&d)[4], uint32_t a0, uint32_t a1, uint32_t b, int32_t c) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%7,%7,%7};"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(a0), "r"(a1), "r"(b), "r"(c));
}
// d += a b of 16 x 16 and 16 x 8 halves, sums in single precision.
EH2O_DEVICE void mma_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace edgeh2o::cuda
