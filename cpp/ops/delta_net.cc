#include "ops/delta_net.h"

#include <cmath>
#include <cstring>

#include "base/arena.h"
#include "base/check.h"
#include "base/parallel.h"
#include "ops/softplus.h"

namespace edgeh2o {
namespace {

constexpr size_t kMaxHeadDim = 512;

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// Decays every row of the state by itself before each token, which the kernel then takes without a decay.
void step_by_rows(const KernelTable& table, DeltaSlice slice, size_t decay_stride) {
  static constexpr float kNone = 1.0f;
  const float* decays = slice.decays;
  const size_t n = slice.n_tokens;
  slice.n_tokens = 1;
  slice.decays = &kNone;
  for (size_t t = 0; t < n; ++t) {
    for (size_t row = 0; row < slice.key_dim; ++row) {
      float* columns = slice.state + row * kDeltaColumns;
      const float decay = decays[row];
      for (size_t i = 0; i < kDeltaColumns; ++i) columns[i] *= decay;
    }
    table.delta_net_f32(slice);
    slice.q += slice.qk_stride;
    slice.k += slice.qk_stride;
    slice.v += slice.v_stride;
    slice.rates += slice.gate_stride;
    slice.out += slice.out_stride;
    decays += decay_stride;
  }
}

}  // namespace

void DeltaHeads::check() const {
  EH2O_CHECK(n_key_heads > 0 && n_value_heads > 0 && n_value_heads % n_key_heads == 0,
             "n_value_heads = ", n_value_heads,
             " must be a positive multiple of n_key_heads = ", n_key_heads);
  EH2O_CHECK(head_dim > 0 && head_dim % kDeltaColumns == 0 && head_dim <= kMaxHeadDim,
             "heads of a delta net have ", head_dim, " dimensions; a multiple of ", kDeltaColumns, " up to ",
             kMaxHeadDim, " is supported");
  EH2O_CHECK(log_floor <= 0.0f && (!decays_by_row() || n_key_heads == n_value_heads),
             "log_floor = ", log_floor, " with ", n_key_heads, " heads of keys and ", n_value_heads,
             " of values");
}

void find_gates(MatView<float> rates, MatView<float> decays, const float* a, const float* biases) {
  parallel_for(rates.rows, [&](size_t i, size_t) {
    float *rate = rates.row(i), *decay = decays.row(i);
    for (size_t head = 0; head < rates.cols; ++head) {
      rate[head] = sigmoid(rate[head]);
      decay[head] = std::exp(a[head] * softplus(decay[head] + biases[head]));
    }
  });
}

void find_row_gates(const DeltaHeads& heads, MatView<float> rates, MatView<float> decays, const float* a,
                    const float* biases) {
  parallel_for(rates.rows, [&](size_t i, size_t) {
    float *rate = rates.row(i), *decay = decays.row(i);
    for (size_t head = 0; head < heads.n_value_heads; ++head) {
      rate[head] = sigmoid(rate[head]);
      for (size_t k = head * heads.head_dim; k < (head + 1) * heads.head_dim; ++k) {
        decay[k] = std::exp(heads.log_floor * sigmoid(a[head] * (decay[k] + biases[k])));
      }
    }
  });
}

size_t delta_scratch_bytes(const DeltaHeads& heads) {
  return heads.is_none() ? 0 : round_up(delta_scratch_size(heads.head_dim) * sizeof(float), kAlignment);
}

void delta_net(const KernelTable& table, const DeltaHeads& heads, MatView<const float> qkv,
               MatView<const float> rates, MatView<const float> decays, StateStep state, MatView<float> out,
               uint8_t* scratch) {
  const size_t dim = heads.head_dim, n_slices = dim / kDeltaColumns;
  // A head's slices share the products of its queries and keys; one by one tokens have none to share.
  const bool in_chunks = scratch && qkv.rows >= kLeastDeltaTokens && !heads.decays_by_row();
  const size_t n_at_once = in_chunks ? n_slices : 1;
  parallel_for(heads.n_value_heads * n_slices / n_at_once, [&](size_t task, size_t thread) {
    const size_t first = task * n_at_once, head = first / n_slices, column = first * kDeltaColumns;
    DeltaSlice slice;
    slice.n_tokens = qkv.rows;
    slice.key_dim = dim;
    slice.q = qkv.data + heads.key_head(head) * dim;
    slice.k = slice.q + heads.key_dim();
    slice.qk_stride = slice.v_stride = qkv.stride;
    slice.v = qkv.data + 2 * heads.key_dim() + column;
    slice.decays = decays.data + head * (heads.decays_by_row() ? dim : 1);
    slice.rates = rates.data + head;
    slice.gate_stride = rates.stride;
    const StateStep own = state.at(first * dim * kDeltaColumns);
    if (own.before != own.after) {
      std::memcpy(own.after, own.before, n_at_once * dim * kDeltaColumns * sizeof(float));
    }
    slice.state = own.after;
    slice.out = out.data + column;
    slice.out_stride = out.stride;
    if (in_chunks) {
      uint8_t* own = scratch + thread * delta_scratch_bytes(heads);
      table.delta_net_chunks_f32(slice, n_slices, reinterpret_cast<float*>(own));
    } else if (heads.decays_by_row()) {
      step_by_rows(table, slice, decays.stride);
    } else {
      table.delta_net_f32(slice);
    }
  });
}

}  // namespace edgeh2o
