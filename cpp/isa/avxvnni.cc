#define EH2O_ISA avxvnni
#include "simd/simd_avx2.h"
//
#include "isa/kernel_table-inl.h"
