#include "base/cpu_features.h"

#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace edgeh2o {

#if defined(__APPLE__)
namespace {

// What macOS says of an instruction set ("Determining instruction set characteristics" of Apple's
// documentation of the kernel); `otherwise` where its name is not known there.
bool has_option(const char* name, bool otherwise = false) {
  int value = 0;
  size_t n_bytes = sizeof value;
  return sysctlbyname(name, &value, &n_bytes, nullptr, 0) == 0 ? value != 0 : otherwise;
}

}  // namespace
#endif

#if defined(__x86_64__)

namespace {

// Extended control register 0: which register files the operating system saves (Intel SDM vol. 1, 13.3).
uint64_t read_xcr0() {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

bool is_made_by(uint32_t ebx, uint32_t edx, uint32_t ecx) {
  uint32_t a, b, c, d;
  return __get_cpuid(0, &a, &b, &c, &d) && b == ebx && d == edx && c == ecx;
}

// Intel's first processors with AVX512_BF16 do no more of its products per cycle than of f32 ones.
bool is_amd() { return is_made_by(signature_AMD_ebx, signature_AMD_edx, signature_AMD_ecx); }

constexpr bool bit(uint32_t word, int index) { return (word >> index) & 1; }

}  // namespace

CpuFeatures detect_cpu_features() {
  CpuFeatures features;
  uint32_t a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return features;
  const bool has_osxsave = bit(c, 27), has_fma = bit(c, 12), has_f16c = bit(c, 29), has_avx = bit(c, 28);
  if (!has_osxsave || !has_avx) return features;
  const uint64_t xcr0 = read_xcr0();
  const bool saves_ymm = (xcr0 & 0x6) == 0x6;
#if defined(__APPLE__)
  const bool saves_zmm = has_option("hw.optional.avx512f");  // from the first use on: not in the register yet
#else
  const bool saves_zmm = (xcr0 & 0xe6) == 0xe6;
#endif
  if (!saves_ymm || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return features;
  features.avx2 = bit(b, 5) && has_fma && has_f16c;
  const bool has_avx512 = bit(b, 16) && bit(b, 17) && bit(b, 30) && bit(b, 31);  // f, dq, bw, vl
  features.avx512vnni = features.avx2 && saves_zmm && has_avx512 && bit(c, 11);
  if (a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) {
    features.avxvnni = features.avx2 && bit(a, 4);
    features.avx512bf16 = features.avx512vnni && bit(a, 5) && is_amd();
  }
  return features;
}

size_t weights_ahead() {
  // Asked once: a virtual machine's host answers.
  static const bool is_intel = is_made_by(signature_INTEL_ebx, signature_INTEL_edx, signature_INTEL_ecx);
  return is_intel ? size_t{4} << 10 : 0;
}

#elif defined(__aarch64__) && defined(__APPLE__)

CpuFeatures detect_cpu_features() {
  CpuFeatures features;
  features.neon = true;
  // macOS 11 does not know the names, and runs on the M1, which has these two and not those below.
  features.neon_dotprod =
      has_option("hw.optional.arm.FEAT_DotProd", true) && has_option("hw.optional.arm.FEAT_FP16", true);
  features.neon_i8mm = features.neon_dotprod && has_option("hw.optional.arm.FEAT_I8MM") &&
                       has_option("hw.optional.arm.FEAT_BF16");
  return features;
}

#elif defined(__aarch64__)

CpuFeatures detect_cpu_features() {
  // Bit numbers of the Linux arm64 ABI (uapi asm/hwcap.h); older kernel headers lack the newer names.
  const unsigned long hwcap = getauxval(AT_HWCAP), hwcap2 = getauxval(AT_HWCAP2);
  const bool has_fp16 = (hwcap >> 9 & 1) && (hwcap >> 10 & 1);  // FPHP, ASIMDHP
  CpuFeatures features;
  features.neon = hwcap >> 1 & 1;                                          // ASIMD
  features.neon_dotprod = features.neon && has_fp16 && (hwcap >> 20 & 1);  // ASIMDDP
  features.neon_i8mm = features.neon_dotprod && (hwcap2 >> 13 & 3) == 3;   // I8MM, BF16
  return features;
}

#else

CpuFeatures detect_cpu_features() { return {}; }

#endif

#if !defined(__x86_64__)
size_t weights_ahead() { return 0; }
#endif

}  // namespace edgeh2o
