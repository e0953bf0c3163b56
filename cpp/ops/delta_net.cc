#include "ops/delta_net.h"

#include <cmath>

#include "base/check.h"
#include "base/parallel.h"
#include "ops/softplus.h"

namespace edgeh2o {
namespace {

constexpr size_t kMaxHeadDim = 512;

}  // namespace

void DeltaHeads::check() const {
  EH2O_CHECK(n_key_heads > 0 && n_value_heads > 0 && n_value_heads % n_key_heads == 0,
             "n_value_heads = ", n_value_heads,
             " must be a positive multiple of n_key_heads = ", n_key_heads);
  EH2O_CHECK(head_dim > 0 && head_dim % kDeltaColumns == 0 && head_dim <= kMaxHeadDim,
             "heads of a delta net have ", head_dim, " dimensions; a multiple of ", kDeltaColumns, " up to ",
             kMaxHeadDim, " is supported");
}

void find_gates(MatView<float> rates, MatView<float> decays, const float* a, const float* biases) {
  parallel_for(rates.rows, [&](size_t i, size_t) {
    float *rate = rates.row(i), *decay = decays.row(i);
    for (size_t head = 0; head < rates.cols; ++head) {
      rate[head] = 1.0f / (1.0f + std::exp(-rate[head]));
      decay[head] = std::exp(a[head] * softplus(decay[head] + biases[head]));
    }
  });
}

void delta_net(const KernelTable& table, const DeltaHeads& heads, MatView<const float> qkv,
               MatView<const float> rates, MatView<const float> decays, float* state, MatView<float> out) {
  const size_t dim = heads.head_dim, n_slices = dim / kDeltaColumns;
  parallel_for(heads.n_value_heads * n_slices, [&](size_t task, size_t) {
    const size_t head = task / n_slices, column = head * dim + task % n_slices * kDeltaColumns;
    DeltaSlice slice;
    slice.n_tokens = qkv.rows;
    slice.key_dim = dim;
    slice.q = qkv.data + heads.key_head(head) * dim;
    slice.k = slice.q + heads.key_dim();
    slice.qk_stride = slice.v_stride = qkv.stride;
    slice.v = qkv.data + 2 * heads.key_dim() + column;
    slice.decays = decays.data + head;
    slice.rates = rates.data + head;
    slice.gate_stride = rates.stride;
    slice.state = state + task * dim * kDeltaColumns;
    slice.out = out.data + column;
    slice.out_stride = out.stride;
    table.delta_net_f32(slice);
  });
}

}  // namespace edgeh2o
