// What a GPU reaches at the very most, measured: a copy, products on tensor cores, fused multiply-adds.
// Compiled by bench/cuda_roofline.py; no part of the package.

struct Words {
  unsigned x, y, z, w;
};

struct CopyArguments {
  Words* to;
  const Words* from;
  unsigned long long n;
};

struct LoopArguments {
  int* out;
  unsigned n;  // of the loop
};

extern "C" __global__ void __launch_bounds__(256) peak_copy(const CopyArguments a) {
  const unsigned long long stride = 256ull * gridDim.x;
  for (unsigned long long i = blockIdx.x * 256ull + threadIdx.x; i < a.n; i += stride) a.to[i] = a.from[i];
}

// Eight independent products of 16 x 32 and 32 x 8 bytes a warp and round.
extern "C" __global__ void __launch_bounds__(256) peak_mma_s8(const LoopArguments a) {
  int d[8][4] = {};
  const unsigned x = threadIdx.x * 0x01010101u;
  for (unsigned i = 0; i < a.n; ++i) {
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      asm volatile(
          "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%4,%4,%4}, {%5,%5}, "
          "{%0,%1,%2,%3};"
          : "+r"(d[k][0]), "+r"(d[k][1]), "+r"(d[k][2]), "+r"(d[k][3])
          : "r"(x), "r"(x + i));
    }
  }
  int sum = 0;
  for (int k = 0; k < 8; ++k) sum += d[k][0] + d[k][1] + d[k][2] + d[k][3];
  if (sum == 123456789) a.out[threadIdx.x] = sum;  // else the loop would be left out
}

// Eight independent products of 16 x 16 and 16 x 8 halves a warp and round, sums in f32.
extern "C" __global__ void __launch_bounds__(256) peak_mma_f16(const LoopArguments a) {
  float d[8][4] = {};
  const unsigned x = threadIdx.x * 0x00010001u;
  for (unsigned i = 0; i < a.n; ++i) {
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%4,%4,%4}, {%5,%5}, "
          "{%0,%1,%2,%3};"
          : "+f"(d[k][0]), "+f"(d[k][1]), "+f"(d[k][2]), "+f"(d[k][3])
          : "r"(x), "r"(x + i));
    }
  }
  float sum = 0.0f;
  for (int k = 0; k < 8; ++k) sum += d[k][0] + d[k][1] + d[k][2] + d[k][3];
  if (sum == 1.25f) a.out[threadIdx.x] = 1;
}

// Sixteen independent fused multiply-adds a thread and round.
extern "C" __global__ void __launch_bounds__(256) peak_fma_f32(const LoopArguments a) {
  float d[16];
#pragma unroll
  for (int k = 0; k < 16; ++k) d[k] = threadIdx.x + k;
  const float x = 1.0f + threadIdx.x * 1e-9f;
  for (unsigned i = 0; i < a.n; ++i) {
#pragma unroll
    for (int k = 0; k < 16; ++k) d[k] = __fmaf_rn(d[k], x, 1e-3f);
  }
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < 16; ++k) sum += d[k];
  if (sum == 1.25f) a.out[threadIdx.x] = 1;
}
