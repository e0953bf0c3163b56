#include "ops/delta_net.h"

#include <cmath>
#include <cstring>

#include "base/arena.h"
#include "base/check.h"
#include "base/parallel.h"
#include "ops/softplus.h"

namespace edgeh2o {
namespace {

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

}  // namespace

void DeltaHeads::check() const {
  EH2O_CHECK(n_key_heads > 0 && n_value_heads > 0 && n_value_heads % n_key_heads == 0,
             "n_value_heads = ", n_value_heads,
             " must be a positive multiple of n_key_heads = ", n_key_heads);
  EH2O_CHECK(head_dim > 0 && head_dim % kDeltaColumns == 0 && head_dim <= kMaxDeltaKeyDim,
             "heads of a delta net have ", head_dim, " dimensions; a multiple of ", kDeltaColumns, " up to ",
             kMaxDeltaKeyDim, " is supported");
  EH2O_CHECK(!decays_by_row || n_key_heads == n_value_heads, "rows decay by themselves in ", n_value_heads,
             " heads with ", n_key_heads, " heads of keys");
  EH2O_CHECK(log_floor <= 0.0f && (decays_by_row || (log_floor == 0.0f && gate_rank == 0)),
             "log_floor = ", log_floor, " and gate_rank = ", gate_rank, " of heads that decay as a whole");
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

void find_row_gates(const KernelTable& table, const DeltaHeads& heads, MatView<float> rates,
                    MatView<float> decays, const float* a, const float* biases) {
  parallel_for(rates.rows, [&](size_t i, size_t) {
    float* rate = rates.row(i);
    for (size_t head = 0; head < heads.n_value_heads; ++head) {
      rate[head] = sigmoid(rate[head]);
      const size_t first = head * heads.head_dim;
      table.row_decays_f32(decays.row(i) + first, biases + first, a[head], heads.log_floor, heads.head_dim);
    }
  });
}

size_t delta_scratch_bytes(const DeltaHeads& heads) {
  if (heads.is_none()) return 0;
  return round_up(delta_scratch_size(heads.head_dim, heads.decays_by_row) * sizeof(float), kAlignment);
}

void delta_net(const KernelTable& table, const DeltaHeads& heads, MatView<const float> qkv,
               MatView<const float> rates, MatView<const float> decays, StateStep state, MatView<float> out,
               uint8_t* scratch) {
  const size_t dim = heads.head_dim, n_slices = dim / kDeltaColumns;
  // A head's slices share the products of its queries and keys; one by one tokens have none to share.
  const bool in_chunks = scratch && qkv.rows >= kLeastDeltaTokens;
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
    slice.decays_by_row = heads.decays_by_row;
    slice.decays = decays.data + head * (slice.decays_by_row ? dim : 1);
    slice.decay_stride = decays.stride;
    slice.rates = rates.data + head;
    slice.rate_stride = rates.stride;
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
    } else {
      table.delta_net_f32(slice);
    }
  });
}

}  // namespace edgeh2o
