// What the processor and the operating system can run. Baseline code: compiled without ISA flags.
#pragma once

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

}  // namespace edgeh2o
