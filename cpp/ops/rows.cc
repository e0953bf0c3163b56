#include "ops/rows.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "base/parallel.h"
#include "ops/softplus.h"

namespace edgeh2o {
namespace {

// Rows go tile by tile: the f32 result of a tile is packed while it is in the cache.
template <typename RowFunction>
MatmulInput for_each_row(const KernelTable& table, size_t n_rows, size_t n_cols, const ActivationsOut& out,
                         uint8_t* scratch, const RowFunction& compute_row) {
  const size_t tile_rows = activation_tile_rows(table, n_rows);
  const Activations8 packed{out.packed.packed, tile_rows, n_cols, out.packed.scale_block};
  const size_t scratch_bytes = row_scratch_bytes(table, n_cols);
  parallel_for(ceil_div(n_rows, tile_rows), [&](size_t tile, size_t thread) {
    const size_t first = tile * tile_rows, count = std::min(tile_rows, n_rows - first);
    const MatView<float> rows =
        out.rows.data ? out.rows.rows_from(first, count)
                      : MatView<float>{reinterpret_cast<float*>(scratch + thread * scratch_bytes), count,
                                       n_cols, n_cols};
    for (size_t i = 0; i < count; ++i) compute_row(rows.row(i), first + i);
    if (packed.packed) {
      table.quantize_q8p_f32(packed.packed + tile * packed.tile_bytes(), rows.data, rows.stride, count,
                             tile_rows, n_cols, packed.scale_block);
    }
  });
  return {packed, {out.rows.data, n_rows, n_cols, out.rows.stride}};
}

}  // namespace

void embed_rows(const KernelTable& table, const PackedMatrix& embedding, Span<const int32_t> tokens,
                float scale, MatView<float> out) {
  embed_columns(table, {&embedding, 1}, tokens, 0, scale, out);
}

void embed_columns(const KernelTable& table, Span<const PackedMatrix> parts, Span<const int32_t> tokens,
                   size_t first, float scale, MatView<float> out) {
  parallel_for(tokens.size, [&](size_t i, size_t) {
    float* row = out.row(i);
    const auto token = static_cast<size_t>(tokens[i]);
    const size_t n_rows = parts.data[0].rows();
    parts.data[token / n_rows].dequantize_range(row, token % n_rows, first, out.cols);
    if (scale != 1.0f) table.scale_f32(row, row, scale, out.cols);
  });
}

void add_table_rows(const KernelTable& table, const PackedMatrix& rows, size_t first, MatView<float> buffer,
                    MatView<float> x) {
  parallel_for(x.rows, [&](size_t i, size_t) {
    rows.dequantize_row(buffer.row(i), first + i);
    table.add_f32(x.row(i), buffer.row(i), x.cols);
  });
}

void scale_logits(const KernelTable& table, MatView<float> logits, float scale, float soft_cap) {
  if (scale == 1.0f && soft_cap == 0.0f) return;
  parallel_for(logits.rows, [&](size_t i, size_t) {
    float* row = logits.row(i);
    table.scale_f32(row, row, scale, logits.cols);
    if (soft_cap > 0.0f) table.soft_cap_f32(row, soft_cap, logits.cols);
  });
}

void clamp_rows(MatView<float> rows, float lowest, float highest) {
  parallel_for(rows.rows, [&](size_t i, size_t) {
    float* row = rows.row(i);
    for (size_t column = 0; column < rows.cols; ++column) {
      row[column] = std::min(std::max(row[column], lowest), highest);
    }
  });
}

void cut_off_rows(const KernelTable& table, MatView<float> rows, float n_stds) {
  parallel_for(rows.rows, [&](size_t i, size_t) { table.cut_off_f32(rows.row(i), n_stds, rows.cols); });
}

size_t row_scratch_bytes(const KernelTable& table, size_t max_cols) {
  return round_up(std::max(table.layout.tile_rows, table.layout.vector_rows) * max_cols * sizeof(float),
                  kAlignment);
}

MatmulInput norm_rows(const KernelTable& table, MatView<const float> x, const RowNorm& norm,
                      const ActivationsOut& out, uint8_t* scratch) {
  return for_each_row(table, x.rows, x.cols, out, scratch, [&](float* row, size_t i) {
    if (norm.centres) {
      table.layer_norm_f32(row, x.row(i), norm.weight, norm.bias, x.cols, norm.eps);
    } else {
      table.rms_norm_f32(row, x.row(i), norm.weight, x.cols, norm.eps);
      if (norm.bias) table.add_f32(row, norm.bias, x.cols);
    }
  });
}

MatmulInput rms_norm_rows(const KernelTable& table, MatView<const float> x, const float* weight, float eps,
                          const ActivationsOut& out, uint8_t* scratch) {
  return norm_rows(table, x, {weight, nullptr, false, eps}, out, scratch);
}

MatmulInput xielu_rows(const KernelTable& table, const Xielu& xielu, MatView<const float> x,
                       const ActivationsOut& out, uint8_t* scratch) {
  return for_each_row(table, x.rows, x.cols, out, scratch, [&](float* row, size_t i) {
    table.xielu_f32(row, x.row(i), xielu.positive, xielu.negative, xielu.beta, xielu.eps, x.cols);
  });
}

MatmulInput gate_rows(const KernelTable& table, GateKernel kernel, MatView<const float> gate,
                      MatView<const float> up, const ActivationsOut& out, uint8_t* scratch) {
  return for_each_row(table, gate.rows, gate.cols, out, scratch,
                      [&](float* row, size_t i) { kernel(row, gate.row(i), up.row(i), gate.cols); });
}

void rms_norm_groups(const KernelTable& table, MatView<float> rows, size_t size, Span<const float> weight,
                     float eps) {
  parallel_for(rows.rows, [&](size_t i, size_t) {
    for (size_t column = 0; column < rows.cols; column += size) {
      float* group = rows.row(i) + column;
      table.rms_norm_f32(group, group, weight.data + column % weight.size, size, eps);
    }
  });
}

void rms_norm_groups(const KernelTable& table, MatView<float> rows, Span<const float> weight, float eps) {
  rms_norm_groups(table, rows, weight.size, weight, eps);
}

void copy_rows(MatView<const float> from, MatView<float> to) {
  parallel_for(to.rows, [&](size_t i, size_t) { std::copy(from.row(i), from.row(i) + to.cols, to.row(i)); });
}

void add_vector(const KernelTable& table, MatView<float> rows, const float* vector) {
  parallel_for(rows.rows, [&](size_t i, size_t) { table.add_f32(rows.row(i), vector, rows.cols); });
}

void add_rows(const KernelTable& table, MatView<float> x, MatView<float> rows, const float* weight, float eps,
              float scale) {
  parallel_for(x.rows, [&](size_t i, size_t) {
    float* row = rows.row(i);
    if (weight) table.rms_norm_f32(row, row, weight, x.cols, eps);
    if (scale != 1.0f) table.scale_f32(row, row, scale, x.cols);
    table.add_f32(x.row(i), row, x.cols);
  });
}

MatmulInput pack_rows(const KernelTable& table, MatView<const float> rows, const PackedOut& packed) {
  MatmulInput input;
  input.rows = rows;
  if (packed.packed) input.packed = quantize_rows(table, rows, packed);
  return input;
}

void fill_rope_table(float* cos, float* sin, size_t first_position, size_t n_positions,
                     Span<const float> inv_freq, float factor) {
  parallel_for(n_positions, [&](size_t i, size_t) {
    const double position = static_cast<double>(first_position + i);
    for (size_t k = 0; k < inv_freq.size; ++k) {
      const double angle = position * static_cast<double>(inv_freq[k]);
      cos[i * inv_freq.size + k] = factor * static_cast<float>(std::cos(angle));
      sin[i * inv_freq.size + k] = factor * static_cast<float>(std::sin(angle));
    }
  });
}

void rope_rows(const KernelTable& table, MatView<float> rows, const float* cos, const float* sin,
               size_t head_dim, size_t n_pairs) {
  parallel_for(rows.rows, [&](size_t i, size_t) {
    for (size_t column = 0; column < rows.cols; column += head_dim) {
      table.rope_f32(rows.row(i) + column, cos + i * n_pairs, sin + i * n_pairs, n_pairs);
    }
  });
}

void scale_columns(MatView<float> rows, Span<const float> factors) {
  parallel_for(rows.rows, [&](size_t i, size_t) {
    float* row = rows.row(i);
    for (size_t column = 0; column < rows.cols; ++column) row[column] *= factors.data[column];
  });
}

void gate_heads(HeadGate function, MatView<const float> gates, MatView<float> x) {
  const size_t head_dim = x.cols / gates.cols;
  parallel_for(x.rows, [&](size_t i, size_t) {
    float* head = x.row(i);
    for (size_t h = 0; h < gates.cols; ++h, head += head_dim) {
      const float gate = gates.row(i)[h];
      const float factor = function == HeadGate::kSoftplus ? softplus(gate) : 1.0f / (1.0f + std::exp(-gate));
      for (size_t column = 0; column < head_dim; ++column) head[column] *= factor;
    }
  });
}

void scale_rows(const KernelTable& table, MatView<float> rows, const float* factors) {
  parallel_for(rows.rows,
               [&](size_t i, size_t) { table.scale_f32(rows.row(i), rows.row(i), factors[i], rows.cols); });
}

void scale_by_position(const KernelTable& table, MatView<float> rows, size_t first_position, float scale,
                       size_t period) {
  parallel_for(rows.rows, [&](size_t i, size_t) {
    const auto n_periods = static_cast<double>((first_position + i) / period);
    if (n_periods == 0.0) return;
    const double factor = 1.0 + static_cast<double>(scale) * std::log1p(n_periods);
    table.scale_f32(rows.row(i), rows.row(i), static_cast<float>(factor), rows.cols);
  });
}

void split_rotary_pairs(MatView<float> rows, size_t head_dim, size_t n_pairs) {
  EH2O_CHECK(n_pairs <= kMaxRotaryPairs, "heads with ", n_pairs, " rotary pairs; at most ", kMaxRotaryPairs,
             " are supported");
  parallel_for(rows.rows, [&](size_t i, size_t) {
    float second[kMaxRotaryPairs];
    for (size_t column = 0; column < rows.cols; column += head_dim) {
      float* head = rows.row(i) + column;
      for (size_t pair = 0; pair < n_pairs; ++pair) {
        second[pair] = head[2 * pair + 1];
        head[pair] = head[2 * pair];
      }
      std::copy(second, second + n_pairs, head + n_pairs);
    }
  });
}

}  // namespace edgeh2o
