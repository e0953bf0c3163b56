// The guard of the sparse attention on a device (Sequence::attend is that of the CPU, ops/error_sample.h says
// what it measures).
#include "cuda/device_decoder.h"
#include "cuda/launches.h"
#include "ops/chunk_plan.h"

namespace edgeh2o::cuda {

// As the rule says, and again, or at once, to everything where the guard says so.
void DeviceDecoder::attend_under_guard(const Rows& rows, size_t layer, PromptEnd end) {
  Sequence& sequence = rows.sequence;
  const AttentionHeads& heads = config_.layers[layer].heads;
  const uint64_t n_dense = causal_pairs(rows.position, rows.n, 0);
  const bool is_guarded = sequence.is_guarded(layer, 0);
  const bool is_dense = is_guarded && sequence.reads_densely_at_once();
  if (is_dense) {
    sequence.count_dense_read(layer);
    sequence.count_pairs(0, n_dense);
  } else {
    attend_by_policy(rows, layer, end);
    if (!is_guarded || !sequence.take_error(layer, measure_error(rows, layer, end))) return;
  }
  attend_to_all(rows, layer, rows.attended(attended_dim(config_.layers[layer])));
  sequence.count_pairs(n_dense * heads.n_kv_heads, 0);
}

AttentionError DeviceDecoder::measure_error(const Rows& rows, size_t layer, PromptEnd end) {
  const SampledRows sample = rows.sequence.sampled_rows(layer, rows.position, rows.n, end);
  const size_t dim = attended_dim(config_.layers[layer]), n = sample.size();
  AttentionError error;
  if (n == 0) return error;
  // Rows, then their numbers; on the host what all got before, then this.
  const DeviceState& state = rows.state;
  float* const dense = state.sampled_.as<float>();
  auto* const listed_there = reinterpret_cast<uint32_t*>(dense + n * dim);
  float* const sparse_on_host = state.staged_sampled_.as<float>();
  float* const dense_on_host = sparse_on_host + n * dim;
  auto* const listed = reinterpret_cast<uint32_t*>(dense_on_host + n * dim);
  for (size_t i = 0; i < n; ++i) {
    listed[i] = u32(sample[i]);
    device_->download(sparse_on_host + i * dim, rows.part(sample[i], 1).attended(dim), dim * sizeof(float));
  }
  device_->upload(listed_there, listed, n * sizeof(uint32_t));
  attend_to_all(rows, layer, sample, listed_there, dense);
  device_->download(dense_on_host, dense, n * dim * sizeof(float));
  device_->wait();
  for (size_t i = 0; i < n; ++i) error.add_row(sparse_on_host + i * dim, dense_on_host + i * dim, dim);
  return error;
}

}  // namespace edgeh2o::cuda
