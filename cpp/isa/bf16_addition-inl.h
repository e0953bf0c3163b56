// Compiles the attention in bf16 alone: all that an ISA adds to another one.
#include "isa/kernels-inl.h"

namespace edgeh2o::EH2O_ISA {

extern const Bf16Addition kAddition;
const Bf16Addition kAddition = {attention_kernels<Bf16Products, simd::kHasBf16>(), simd::kPrefersBf16};

}  // namespace edgeh2o::EH2O_ISA
