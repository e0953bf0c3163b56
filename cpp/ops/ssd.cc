#include "ops/ssd.h"

#include <cmath>
#include <cstring>

#include "base/check.h"
#include "base/parallel.h"
#include "ops/softplus.h"

namespace edgeh2o {
namespace {

// Far more than any model has; products of these do not overflow.
constexpr size_t kMaxSsdHeads = 1 << 10, kMaxSsdHeadDim = 1 << 10, kMaxSsdStateDim = 1 << 12;
constexpr size_t kMaxSsdStepRank = 1 << 16;

}  // namespace

void SsdHeads::check() const {
  EH2O_CHECK(n_heads > 0 && n_heads <= kMaxSsdHeads && n_groups > 0 && n_heads % n_groups == 0,
             "n_ssd_heads = ", n_heads, " must be a positive multiple of n_ssd_groups = ", n_groups,
             ", at most ", kMaxSsdHeads);
  EH2O_CHECK(head_dim > 0 && head_dim % kSsdColumns == 0 && head_dim <= kMaxSsdHeadDim,
             "heads of a Mamba-2 layer have ", head_dim, " dimensions; a multiple of ", kSsdColumns,
             " up to ", kMaxSsdHeadDim, " is supported");
  EH2O_CHECK(state_dim > 0 && state_dim % kSsdRows == 0 && state_dim <= kMaxSsdStateDim,
             "the state of a Mamba-2 layer has ", state_dim, " rows; a multiple of ", kSsdRows, " up to ",
             kMaxSsdStateDim, " is supported");
  EH2O_CHECK(step_rank <= kMaxSsdStepRank && (step_rank == 0 || n_groups == 1),
             "rates of a Mamba-2 layer with ", n_groups, " groups are made of ", step_rank,
             " numbers; at most ", kMaxSsdStepRank, " are supported, of one group");
}

void find_rates(MatView<float> rates, MatView<float> decays, const float* a, const float* biases) {
  parallel_for(rates.rows, [&](size_t i, size_t) {
    float *rate = rates.row(i), *decay = decays.row(i);
    for (size_t head = 0; head < rates.cols; ++head) {
      rate[head] = softplus(rate[head] + biases[head]);
      decay[head] = std::exp(a[head] * rate[head]);
    }
  });
}

void ssd(const KernelTable& table, const SsdHeads& heads, MatView<const float> rows,
         MatView<const float> rates, MatView<const float> decays, const float* skips, StateStep state,
         MatView<float> out) {
  const size_t n_slices = heads.head_dim / kSsdColumns, group_size = heads.n_heads / heads.n_groups;
  parallel_for(heads.n_heads * n_slices, [&](size_t task, size_t) {
    const size_t head = task / n_slices, column = task * kSsdColumns;
    SsdSlice slice;
    slice.n_tokens = rows.rows;
    slice.state_dim = heads.state_dim;
    slice.x = rows.data + column;
    slice.b = rows.data + heads.inner_dim() + head / group_size * heads.state_dim;
    slice.c = slice.b + heads.group_state_dim();
    slice.stride = rows.stride;
    slice.decays = decays.data + head;
    slice.rates = rates.data + head;
    slice.gate_stride = rates.stride;
    slice.skip = skips ? skips[head] : 0.0f;
    const size_t n_numbers = heads.state_dim * kSsdColumns;
    const StateStep own = state.at(task * n_numbers);
    if (own.before != own.after) std::memcpy(own.after, own.before, n_numbers * sizeof(float));
    slice.state = own.after;
    slice.out = out.data + column;
    slice.out_stride = out.stride;
    table.ssd_f32(slice);
  });
}

}  // namespace edgeh2o
