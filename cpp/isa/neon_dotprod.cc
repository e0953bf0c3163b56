#define EH2O_ISA neon_dotprod
#include "simd/simd_neon.h"
//
#include "isa/kernel_table-inl.h"
