// Row-wise operations on activations, in parallel over rows.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/mat_view.h"
#include "isa/kernel_table.h"
#include "ops/matmul.h"

namespace edgeh2o {

// out[i] = scale * row tokens[i] of the embedding.
void embed_rows(const KernelTable& table, const PackedMatrix& embedding, Span<const int32_t> tokens,
                float scale, MatView<float> out);
// The same of the out.cols columns from `first` on, a multiple of PackedMatrix::kRangeStep if quantised. The
// rows lie in parts, equal but for the last.
void embed_columns(const KernelTable& table, Span<const PackedMatrix> parts, Span<const int32_t> tokens,
                   size_t first, float scale, MatView<float> out);

// logits *= scale, then soft_cap * tanh(logits / soft_cap) unless that is 0.
void scale_logits(const KernelTable& table, MatView<float> logits, float scale, float soft_cap);

// Numbers below lowest and above highest become these.
void clamp_rows(MatView<float> rows, float lowest, float highest);

// What of every row lies n_stds standard deviations above its mean: see cut_off_f32.
void cut_off_rows(const KernelTable& table, MatView<float> rows, float n_stds);

// What a row-wise operation leaves behind for the next matmul.
struct ActivationsOut {
  MatView<float> rows;  // f32 result; rows.data may be null where only the packed form is wanted
  PackedOut packed;     // 8-bit result
};

// LayerNorm where it centres its input, else RMS norm.
struct RowNorm {
  const float* weight = nullptr;  // [n]
  const float* bias = nullptr;    // [n], or null
  bool centres = false;
  float eps = 0.0f;
};
// Every row of x normed. scratch: num_threads() x row_scratch_bytes.
MatmulInput norm_rows(const KernelTable& table, MatView<const float> x, const RowNorm& norm,
                      const ActivationsOut& out, uint8_t* scratch);
// RMS norm of every row.
MatmulInput rms_norm_rows(const KernelTable& table, MatView<const float> x, const float* weight, float eps,
                          const ActivationsOut& out, uint8_t* scratch);

// A gated activation of KernelTable, such as silu(gate) * up, elementwise.
using GateKernel = void (*)(float* out, const float* gate, const float* up, size_t n);
MatmulInput gate_rows(const KernelTable& table, GateKernel kernel, MatView<const float> gate,
                      MatView<const float> up, const ActivationsOut& out, uint8_t* scratch);

// Every head of every row of x, as many as gates has columns, times a function of its gate.
enum class HeadGate : uint8_t { kSigmoid, kSoftplus };
void gate_heads(HeadGate function, MatView<const float> gates, MatView<float> x);

// x += rows of the table, from row `first` on. buffer: as many rows as x has.
void add_table_rows(const KernelTable& table, const PackedMatrix& rows, size_t first, MatView<float> buffer,
                    MatView<float> x);

// xIELU of every number: see xielu_f32.
struct Xielu {
  float positive = 0.0f, negative = 0.0f, beta = 0.0f, eps = 0.0f;
};
MatmulInput xielu_rows(const KernelTable& table, const Xielu& xielu, MatView<const float> x,
                       const ActivationsOut& out, uint8_t* scratch);

// RMS norm in place of every group of `size` columns of every row; the weights are of one group, or of as
// many as there are.
void rms_norm_groups(const KernelTable& table, MatView<float> rows, size_t size, Span<const float> weight,
                     float eps);
// Of every group of weight.size columns.
void rms_norm_groups(const KernelTable& table, MatView<float> rows, Span<const float> weight, float eps);

void copy_rows(MatView<const float> from, MatView<float> to);

// The vector [rows.cols] is added to every row.
void add_vector(const KernelTable& table, MatView<float> rows, const float* vector);

// x += scale * rms_norm(rows), without the norm if weight is null; changes rows.
void add_rows(const KernelTable& table, MatView<float> x, MatView<float> rows, const float* weight, float eps,
              float scale);

// Packs rows that exist already; input.rows are the rows themselves.
MatmulInput pack_rows(const KernelTable& table, MatView<const float> rows, const PackedOut& packed);

// Bytes of scratch per thread for rows of up to `max_cols`.
size_t row_scratch_bytes(const KernelTable& table, size_t max_cols);

// cos and sin of position * inv_freq[i], times `factor`: both [n_positions][n_freqs].
void fill_rope_table(float* cos, float* sin, size_t first_position, size_t n_positions,
                     Span<const float> inv_freq, float factor);

// Rotates every head of every row: rows [n][n_heads * head_dim], the first 2 * n_pairs values of each head.
void rope_rows(const KernelTable& table, MatView<float> rows, const float* cos, const float* sin,
               size_t head_dim, size_t n_pairs);

// Every column times its factor [rows.cols].
void scale_columns(MatView<float> rows, Span<const float> factors);

// Every row times its factor.
void scale_rows(const KernelTable& table, MatView<float> rows, const float* factors);

// Row i, at position first_position + i, times 1 + scale * ln(1 + floor(position / period)): queries far
// beyond the first training get sharper logits.
void scale_by_position(const KernelTable& table, MatView<float> rows, size_t first_position, float scale,
                       size_t period);

// Brings the pairs (2i, 2i + 1) of every head to where rope_rows has them, (i, n_pairs + i), in place.
// Queries and keys both reordered give the same logits. n_pairs <= kMaxRotaryPairs.
inline constexpr size_t kMaxRotaryPairs = 512;
void split_rotary_pairs(MatView<float> rows, size_t head_dim, size_t n_pairs);

}  // namespace edgeh2o
