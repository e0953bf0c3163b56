#define EH2O_ISA neon
#include "simd/simd_neon.h"
//
#include "isa/kernel_table-inl.h"
