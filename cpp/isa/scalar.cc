#define EH2O_ISA scalar
#include "simd/simd_scalar.h"
//
#include "isa/kernel_table-inl.h"
