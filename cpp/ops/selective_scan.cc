#include "ops/selective_scan.h"

#include <cstring>

#include "base/check.h"
#include "base/parallel.h"

namespace edgeh2o {
namespace {

// Far more than any model has; products of these do not overflow.
constexpr size_t kMaxChannels = 1 << 20, kMaxStateDim = 1 << 10, kMaxStepRank = 1 << 16;

}  // namespace

void ScanSizes::check() const {
  EH2O_CHECK(n_channels > 0 && n_channels % kScanChannels == 0 && n_channels <= kMaxChannels,
             "a Mamba layer has ", n_channels, " channels; a multiple of ", kScanChannels, " up to ",
             kMaxChannels, " is supported");
  EH2O_CHECK(state_dim > 0 && state_dim % kScanRows == 0 && state_dim <= kMaxStateDim,
             "the state of a channel of a Mamba layer has ", state_dim, " numbers; a multiple of ", kScanRows,
             " up to ", kMaxStateDim, " is supported");
  EH2O_CHECK(step_rank > 0 && step_rank <= kMaxStepRank, "the steps of a Mamba layer have rank ", step_rank,
             "; 1 to ", kMaxStepRank, " are supported");
}

void selective_scan(const KernelTable& table, const ScanSizes& sizes, MatView<const float> x,
                    MatView<const float> steps, MatView<const float> bc, const float* a, const float* skips,
                    StateStep state, MatView<float> out) {
  const size_t n_numbers = sizes.state_dim * kScanChannels;
  parallel_for(sizes.n_channels / kScanChannels, [&](size_t task, size_t) {
    const size_t channel = task * kScanChannels;
    const StateStep own = state.at(task * n_numbers);
    if (own.before != own.after) std::memcpy(own.after, own.before, n_numbers * sizeof(float));
    ScanSlice slice;
    slice.n_tokens = x.rows;
    slice.state_dim = sizes.state_dim;
    slice.x = x.data + channel;
    slice.x_stride = x.stride;
    slice.steps = steps.data + channel;
    slice.step_stride = steps.stride;
    slice.b = bc.data;
    slice.c = bc.data + sizes.state_dim;
    slice.bc_stride = bc.stride;
    slice.a = a + task * n_numbers;
    slice.skips = skips ? skips + channel : nullptr;
    slice.state = own.after;
    slice.out = out.data + channel;
    slice.out_stride = out.stride;
    table.selective_scan_f32(slice);
  });
}

}  // namespace edgeh2o
