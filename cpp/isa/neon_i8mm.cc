#define EH2O_ISA neon_i8mm
#include "simd/simd_neon.h"
//
#include "isa/kernel_table-inl.h"
