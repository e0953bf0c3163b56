// What the processor and the operating system can run. Baseline code: compiled without ISA flags.
#pragma once

#include <cstddef>

namespace edgeh2o {

struct CpuFeatures {
  bool avx2 = false;        // avx2 + fma + f16c, registers saved by the OS
  bool avxvnni = false;     // avx2 set + AVX-VNNI (VEX)
  bool avx512vnni = false;  // avx2 set + avx512 f, bw, dq, vl, vnni, registers saved by the OS
  bool avx512bf16 = false;  // avx512vnni set + AVX512_BF16, of AMD
  bool neon = false;
  bool neon_dotprod = false;  // asimddp + fp16 storage and arithmetic
  bool neon_i8mm = false;     // neon_dotprod + i8mm + bf16
};

CpuFeatures detect_cpu_features();

// Bytes behind the weights in work that matrix-vector kernels fetch, or 0. Intel's processors do not go on by
// themselves behind the end of 4 KiB: a call of one token gains up to a quarter. AMD's do, and lose by it: on
// Zen 4 one thread reads Q4_K at 19.7 GB/s with it and at 26.0 without, two at 31.4 and 35.6 of 36.
size_t weights_ahead();

}  // namespace edgeh2o
