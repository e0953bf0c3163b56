#define EH2O_ISA avx512bf16
#include "simd/simd_avx512.h"
//
#include "isa/bf16_addition-inl.h"
