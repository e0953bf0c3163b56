#include "ops/wkv.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/check.h"
#include "base/parallel.h"

namespace edgeh2o {
namespace {

constexpr size_t kMaxWkvHeads = 1 << 12, kMaxWkvHeadDim = 512, kMaxRank = 1 << 16;
constexpr float kLogFloor = -0.606531f;  // of decays: -exp(-1/2), as it is trained
constexpr float kNormEps = 64e-5f;       // of what comes out of a head
constexpr float kLeastSquare = 1e-24f;   // of the length of a direction

// f(slice, head) for columns of every head, in parallel, with what recurrences have in common: the state is
// that behind the tokens, and still the one before them.
template <typename Slice, typename F>
void for_each_slice(const WkvHeads& heads, MatView<const float> rows, const float* queries, StateStep state,
                    MatView<float> out, const F& f) {
  const size_t dim = heads.dim(), head_dim = heads.head_dim, n_slices = head_dim / kWkvColumns;
  const size_t n_numbers = head_dim * kWkvColumns, group = heads.n_heads / heads.n_kv_heads;
  parallel_for(heads.n_heads * n_slices, [&](size_t task, size_t) {
    const size_t head = task / n_slices, first = head * head_dim, column = task * kWkvColumns;
    const StateStep own = state.at(task * n_numbers);
    if (own.before != own.after) std::memcpy(own.after, own.before, n_numbers * sizeof(float));
    Slice slice;
    slice.n_tokens = rows.rows;
    slice.key_dim = head_dim;
    slice.decays = rows.data + first;
    slice.keys = rows.data + dim + first;
    slice.values = rows.data + 2 * dim + head / group * head_dim + (column - first);
    slice.queries = queries + first;
    slice.stride = rows.stride;
    slice.state = own.after;
    slice.out = out.data + column;
    slice.out_stride = out.stride;
    f(slice, head);
  });
}

}  // namespace

size_t WkvHeads::widest_rank() const {
  return std::max({decay_rank, rate_rank, value_rank, gate_rank, 5 * shift_rank});
}

void WkvHeads::check() const {
  EH2O_CHECK(
      head_dim > 0 && head_dim % kWkvColumns == 0 && head_dim <= kMaxWkvHeadDim && n_heads <= kMaxWkvHeads,
      "an RWKV layer has ", n_heads, " heads of ", head_dim, " numbers; up to ", kMaxWkvHeads,
      " of a multiple of ", kWkvColumns, " up to ", kMaxWkvHeadDim, " are supported");
  EH2O_CHECK(n_kv_heads == n_heads || (is_linear() && n_kv_heads > 0 && n_heads % n_kv_heads == 0),
             "an RWKV layer has ", n_heads, " heads, and ", n_kv_heads, " of keys and values");
  if (is_rwkv6()) {
    EH2O_CHECK(shift_rank <= kMaxRank && decay_rank > 0 && decay_rank <= kMaxRank && rate_rank == 0 &&
                   value_rank == 0 && gate_rank == 0,
               "the vectors of an RWKV-6 layer have ", shift_rank, " and ", decay_rank, " numbers; 1 to ",
               kMaxRank, " are supported");
    return;
  }
  EH2O_CHECK(decay_rank > 0 && rate_rank > 0 && widest_rank() <= kMaxRank,
             "the vectors of an RWKV-7 layer have ", decay_rank, ", ", rate_rank, " and ", gate_rank,
             " numbers; 1 to ", kMaxRank, ", or of gates none, are supported");
}

void shift_rows(MatView<const float> x, StateStep state, MatView<float> out) {
  parallel_for(x.rows, [&](size_t i, size_t) {
    const float *row = x.row(i), *before = i > 0 ? x.row(i - 1) : state.before;
    float* difference = out.row(i);
    for (size_t k = 0; k < x.cols; ++k) difference[k] = before[k] - row[k];
  });
  if (x.rows > 0) std::memcpy(state.after, x.row(x.rows - 1), x.cols * sizeof(float));
}

void mix_rows(MatView<const float> x, MatView<const float> differences, const float* shares,
              MatView<float> out) {
  parallel_for(x.rows, [&](size_t i, size_t) {
    const float *row = x.row(i), *difference = differences.row(i);
    float* mixed = out.row(i);
    for (size_t k = 0; k < x.cols; ++k) mixed[k] = row[k] + difference[k] * shares[k];
  });
}

void mix_rows_by(MatView<const float> x, MatView<const float> differences, const float* shares,
                 MatView<float> out) {
  parallel_for(x.rows, [&](size_t i, size_t) {
    const float *row = x.row(i), *difference = differences.row(i);
    float* mixed = out.row(i);
    for (size_t k = 0; k < x.cols; ++k) mixed[k] = row[k] + difference[k] * (mixed[k] + shares[k]);
  });
}

void sigmoid_rows(const KernelTable& table, MatView<float> rows, const float* biases, const float* ones) {
  parallel_for(rows.rows, [&](size_t i, size_t) {
    if (biases) table.add_f32(rows.row(i), biases, rows.cols);
    table.gate_f32(rows.row(i), rows.row(i), ones, rows.cols);
  });
}

void mix_values(MatView<float> values, MatView<const float> first, MatView<const float> shares) {
  parallel_for(values.rows, [&](size_t i, size_t) {
    float* value = values.row(i);
    const float *other = first.row(i), *share = shares.row(i);
    for (size_t k = 0; k < values.cols; ++k) value[k] += (other[k] - value[k]) * share[k];
  });
}

void finish_rows(const KernelTable& table, const WkvHeads& heads, const WkvVectors& vectors,
                 const WkvRows& rows) {
  const size_t dim = heads.dim(), head_dim = heads.head_dim;
  parallel_for(rows.keys.rows, [&](size_t i, size_t) {
    table.row_decays_f32(rows.decays.row(i), vectors.decays, 1.0f, kLogFloor, dim);
    float *keys = rows.keys.row(i), *rates = rows.removals.row(i), *directions = rows.directions.row(i);
    table.multiply_f32(directions, keys, vectors.directions, dim);
    for (size_t first = 0; first < dim; first += head_dim) {
      float sum = 0.0f;
      for (size_t k = first; k < first + head_dim; ++k) sum += directions[k] * directions[k];
      const float factor = 1.0f / std::sqrt(std::max(sum, kLeastSquare));
      table.scale_f32(directions + first, directions + first, factor, head_dim);
    }
    for (size_t k = 0; k < dim; ++k) {
      keys[k] *= 1.0f + (rates[k] - 1.0f) * vectors.keys[k];
      rates[k] *= directions[k];
    }
  });
}

void wkv(const KernelTable& table, const WkvHeads& heads, MatView<const float> rows, const float* queries,
         StateStep state, MatView<float> out) {
  const size_t dim = heads.dim();
  for_each_slice<WkvSlice>(heads, rows, queries, state, out, [&](WkvSlice& slice, size_t head) {
    slice.directions = rows.data + 3 * dim + head * heads.head_dim;
    slice.removals = rows.data + 4 * dim + head * heads.head_dim;
    table.wkv_f32(slice);
  });
}

void finish_heads(const KernelTable& table, const WkvHeads& heads, const WkvOutput& weights,
                  const WkvRows& rows, MatView<const float> gate, MatView<float> out) {
  const size_t dim = heads.dim(), head_dim = heads.head_dim;
  parallel_for(out.rows, [&](size_t i, size_t) {
    const float *keys = rows.keys.row(i), *queries = rows.queries.row(i), *values = rows.values.row(i);
    float* row = out.row(i);
    for (size_t first = 0; first < dim; first += head_dim) {
      if (heads.norms_heads) {
        table.layer_norm_f32(row + first, row + first, weights.norm + first, weights.norm_bias + first,
                             head_dim, kNormEps);
      }
      float own = 0.0f;
      for (size_t k = first; k < first + head_dim; ++k) own += keys[k] * queries[k] * weights.bonus[k];
      for (size_t k = first; k < first + head_dim; ++k) row[k] += own * values[k];
    }
    if (heads.gate_rank > 0) table.multiply_f32(row, row, gate.row(i), dim);
  });
}

void finish_rows6(const KernelTable& table, const WkvHeads& heads, const float* biases, const float* bonus,
                  const Wkv6Rows& rows) {
  const size_t head_dim = heads.head_dim;
  parallel_for(rows.keys.rows, [&](size_t i, size_t) {
    table.key_decays_f32(rows.decays.row(i), biases, heads.dim());
    const float *keys = rows.keys.row(i), *queries = rows.queries.row(i);
    for (size_t head = 0; head < heads.n_heads; ++head) {
      float sum = 0.0f;
      for (size_t k = head * head_dim; k < (head + 1) * head_dim; ++k) sum += keys[k] * queries[k] * bonus[k];
      rows.own.row(i)[head] = sum;
    }
  });
}

void finish_linear_rows(const KernelTable& table, const WkvHeads& heads, const float* biases,
                        const Wkv6Rows& rows) {
  const size_t head_dim = heads.head_dim, group = heads.n_heads / heads.n_kv_heads;
  const float scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
  const MatView<float> shared_keys = rows.shared_keys();
  parallel_for(rows.keys.rows, [&](size_t i, size_t) {
    table.key_decays_f32(rows.decays.row(i), biases, heads.dim());
    // No key is overwritten before its last head has it: those that are left lie behind.
    for (size_t head = 0; head < heads.n_heads; ++head) {
      const float* shared = shared_keys.row(i) + head / group * head_dim;
      const float* decays = rows.decays.row(i) + head * head_dim;
      float *keys = rows.keys.row(i) + head * head_dim, *queries = rows.queries.row(i) + head * head_dim;
      float sum = 0.0f;
      for (size_t k = 0; k < head_dim; ++k) {
        keys[k] = shared[k] - shared[k] * decays[k];
        queries[k] *= scale;
        sum += keys[k] * queries[k];
        queries[k] *= decays[k];
      }
      rows.own.row(i)[head] = sum;
    }
  });
}

void wkv6(const KernelTable& table, const WkvHeads& heads, MatView<const float> rows, const float* queries,
          const float* own, StateStep state, MatView<float> out) {
  for_each_slice<Wkv6Slice>(heads, rows, queries, state, out, [&](Wkv6Slice& slice, size_t head) {
    slice.own = own + head;
    slice.own_stride = rows.stride;
    table.wkv6_f32(slice);
  });
}

void finish_heads6(const KernelTable& table, const WkvHeads& heads, const float* norm, const float* norm_bias,
                   MatView<const float> gate, MatView<float> out) {
  const size_t head_dim = heads.head_dim;
  parallel_for(out.rows, [&](size_t i, size_t) {
    float* row = out.row(i);
    if (heads.is_linear()) return table.gate_f32(row, gate.row(i), row, heads.dim());
    for (size_t first = 0; first < heads.dim(); first += head_dim) {
      table.layer_norm_f32(row + first, row + first, norm + first, norm_bias + first, head_dim, kNormEps);
    }
    table.swiglu_f32(row, gate.row(i), row, heads.dim());
  });
}

}  // namespace edgeh2o
