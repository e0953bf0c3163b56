// The kernels by name, with what they take; one list for whoever launches them and for the host device.
#pragma once

#include "cuda/kernels/arguments.h"

#define EH2O_CUDA_KERNELS(X)                  \
  X(norm_rows, NormArguments)                 \
  X(add_rows, AddArguments)                   \
  X(mix_rows, MixArguments)                   \
  X(gate_rows, GateArguments)                 \
  X(rope_rows, RopeArguments)                 \
  X(latent_rows, LatentArguments)             \
  X(embed_rows, EmbedArguments)               \
  X(attend_split, AttendArguments)            \
  X(combine_splits, CombineArguments)         \
  X(attend_tiles_64, AttendTilesArguments)    \
  X(attend_tiles_128, AttendTilesArguments)   \
  X(attend_tiles_256, AttendTilesArguments)   \
  X(column_tiles_64, ColumnArguments)         \
  X(column_tiles_128, ColumnArguments)        \
  X(column_tiles_256, ColumnArguments)        \
  X(join_states, JoinArguments)               \
  X(column_sums, ColumnArguments)             \
  X(mean_rows, MeanArguments)                 \
  X(split_signs, SignArguments)               \
  X(convolve_rows, ConvolveArguments)         \
  X(keep_inputs, ConvolveArguments)           \
  X(delta_gates, DeltaGateArguments)          \
  X(delta_rule, DeltaArguments)               \
  X(ssd, SsdArguments)                        \
  X(multiply_f32, MultiplyArguments)          \
  X(multiply_f16, MultiplyArguments)          \
  X(multiply_bf16, MultiplyArguments)         \
  X(multiply_q4, MultiplyArguments)           \
  X(multiply_q4_min, MultiplyArguments)       \
  X(multiply_q4_small, MultiplyArguments)     \
  X(multiply_q4_small_min, MultiplyArguments) \
  X(multiply_q8, MultiplyArguments)           \
  X(multiply_q8_min, MultiplyArguments)       \
  X(multiply_q8_small, MultiplyArguments)     \
  X(gemm_q4, MultiplyArguments)               \
  X(gemm_q4_min, MultiplyArguments)           \
  X(gemm_q4_small, MultiplyArguments)         \
  X(gemm_q4_small_min, MultiplyArguments)     \
  X(gemm_q8, MultiplyArguments)               \
  X(gemm_q8_min, MultiplyArguments)           \
  X(gemm_q8_small, MultiplyArguments)         \
  X(gemm_tall_q4, MultiplyArguments)          \
  X(gemm_tall_q4_min, MultiplyArguments)      \
  X(gemm_tall_q8, MultiplyArguments)          \
  X(gemm_tall_q8_min, MultiplyArguments)
