#define EH2O_ISA avx2
#include "simd/simd_avx2.h"
//
#include "isa/kernel_table-inl.h"
