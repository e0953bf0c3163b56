// What a sparse rule, which runs on the CPU, is shown of a device between the chunks of a layer, and what it
// says (see sparse/sparse_policy.h).
#include <algorithm>
#include <cstring>
#include <exception>
#include <mutex>

#include "base/check.h"
#include "base/parallel.h"
#include "cuda/device_decoder.h"
#include "cuda/launches.h"

namespace edgeh2o::cuda {
// Scores pages by the device's kernels: attention of the chunk's queries to bounds of keys, without values,
// and column sums of the squared weights. The slots of a layer ask in parallel and get their turn; hooks of a
// rule must not throw, so that an error waits until all are done.
class DeviceDecoder::DevicePageScores final : public PageScorer {
 public:
  DevicePageScores(DeviceDecoder& decoder, const Rows& chunk, size_t layer)
      : decoder_(decoder), chunk_(chunk), layer_(layer) {}

  void score(size_t kv_head, MatView<const float>, const float* bounds, size_t n_pages,
             float* out) const override {
    const std::lock_guard<std::mutex> lock(mutex_);
    try {
      if (!error_) return decoder_.score_pages(chunk_, layer_, kv_head, bounds, n_pages, out);
    } catch (...) {
      error_ = std::current_exception();
    }
    std::fill_n(out, n_pages, 0.0f);
  }

  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  DeviceDecoder& decoder_;
  const Rows& chunk_;
  size_t layer_;
  mutable std::mutex mutex_;
  mutable std::exception_ptr error_;
};

void DeviceDecoder::score_pages(const Rows& chunk, size_t layer, size_t kv_head, const float* bounds,
                                size_t n_pages, float* out) {
  const AttentionHeads& heads = config_.layers[layer].heads;
  const size_t group = heads.group_size(), width = 2 * heads.key_dim;
  const size_t n_ranges = ceil_div(n_pages, size_t{kSplitKeys});
  DeviceState& state = chunk.state;
  float *const on_device = state.bounds_.as<float>(), *const signs = state.signs_.as<float>();
  // After the bounds, their number.
  auto* const count = reinterpret_cast<uint32_t*>(on_device + n_pages * width);
  const uint32_t n = u32(n_pages);
  device_->upload(on_device, bounds, n_pages * width * sizeof(float));
  device_->upload(count, &n, sizeof(n));
  AttendArguments a = attend_arguments(chunk, layer);
  device_->launch(
      "split_signs",
      SignArguments{a.qkv + kv_head * group * heads.key_dim, signs, u32(group), u32(heads.key_dim), a.stride},
      group, chunk.n, 1, kThreads, 0);
  a.cache = {on_device, on_device, n, DeviceCacheType::kF32, DeviceCacheType::kF32};
  a.heads = {u32(group), 1, u32(width), 0, 0};
  a.stride = u32(group * width);
  a.keys.counts = count;
  a.n_splits = u32(n_ranges);
  float* const joined = state.joined_.as<float>();
  for (size_t begin = 0; begin < chunk.n; begin += kAttendRows) {
    const size_t n_rows = std::min(kAttendRows, chunk.n - begin), n_states = n_rows * group;
    a.qkv = signs + begin * group * width;
    launch_attend(a, n_ranges, n_rows);
    device_->launch(
        "join_states",
        JoinArguments{a.states, joined + begin * group * 2, u32(n_states), 0, a.n_splits, a.n_splits},
        ceil_div(n_states, kThreads), 1, 1, kThreads, 0);
  }
  ColumnArguments c{};
  c.qkv = signs, c.cache = a.cache, c.heads = a.heads, c.stride = a.stride, c.keys = a.keys;
  c.scale = a.scale, c.soft_cap = a.soft_cap;
  c.states = joined;
  c.sums = state.sums_.as<float>();
  c.n_rows = u32(chunk.n);
  c.sums_stride = n;
  c.squares = 1;
  device_->launch("column_sums", c, ceil_div(n_pages, kThreads / kWarpSize), 1, 1, kThreads, 0);
  float* const staged = state.staged_sums_.as<float>();
  device_->download(staged, c.sums, n_pages * sizeof(float));
  device_->wait();
  std::copy_n(staged, n_pages, out);
}

// What the rule looks at of keys and values, of all rows of a call at once: every copy is waited for.
void DeviceDecoder::bring_past(const Rows& rows, size_t layer) {
  if (!rows.sequence.plan(layer).needs.looks_at_past) return;
  rows.state.copy_rows_to_host(rows.sequence, layer, rows.position + rows.n);
}

// Asks the rule for every KV head; bring_past has been called.
void DeviceDecoder::choose_memory(const Rows& chunk, size_t layer, Phase phase,
                                  std::vector<MemorySet>& sets) {
  SparsePolicy& policy = chunk.sequence.policy_of_call();
  const LayerSpec& spec = config_.layers[layer];
  const PolicyNeeds& needs = chunk.sequence.plan(layer).needs;
  const LayerKv& rows = chunk.sequence.layer(layer).rows();
  const size_t width = spec.heads.group_size() * spec.heads.key_dim;
  const DevicePageScores scores(*this, chunk, layer);
  const float* const queries = chunk.state.staged_queries_.as<float>() + spec.gate_dim();
  if (needs.looks_at_queries) {
    device_->download(chunk.state.staged_queries_.as<void>(), chunk.qkv(spec),
                      chunk.n * spec.qkv_dim() * sizeof(float));
    device_->wait();
  }
  parallel_for(sets.size(), [&](size_t kv_head, size_t) {
    SelectionInput input;
    input.chunk = {chunk.position, chunk.position + chunk.n};
    if (needs.looks_at_past) {
      input.past_keys = rows.k(kv_head);
      input.past_values = rows.v(kv_head);
      input.add_kv_rows = table_.add_kv_rows_f32;
    }
    input.takes_means = true;
    if (needs.looks_at_queries) input.queries = {queries + kv_head * width, chunk.n, width, spec.qkv_dim()};
    if (phase == Phase::kPrefill) input.page_scorer = &scores;
    sets[kv_head] = policy.select(phase, policy.shape().slot(layer, kv_head), input);
  });
  scores.rethrow();
}

// Brings what was chosen to the device.
DeviceDecoder::Memory DeviceDecoder::stage_memory(const Rows& chunk, size_t layer,
                                                  const std::vector<MemorySet>& sets) {
  const AttentionHeads& heads = config_.layers[layer].heads;
  const PolicyNeeds& needs = chunk.sequence.plan(layer).needs;
  DeviceState& state = chunk.state;
  const SparsePolicy& policy = chunk.sequence.policy();
  Memory memory;
  bool has_means = false;
  for (const MemorySet& set : sets) {
    EH2O_CHECK(set.n_positions() <= chunk.position && set.synthetic.count <= needs.max_synthetic,
               "a rule chose ", set.n_positions(), " positions and ", set.synthetic.count, " other rows of ",
               chunk.position, " and at most ", needs.max_synthetic);
    if (set.positions) check_positions({set.positions, set.n_listed}, chunk.position);
    EH2O_CHECK(set.positions || set.range.end <= chunk.position, "a rule chose positions up to ",
               set.range.end, " for a chunk at ", chunk.position);
    memory.most = std::max(memory.most, set.n_positions());
    memory.most_synthetic = std::max(memory.most_synthetic, set.synthetic.count);
    has_means = has_means || set.synthetic.means;
  }
  device_->wait();  // the memory that is staged from may still be read

  // Positions [kv_head][most]; then of every KV head their number, that of synthetic rows, and whether it is
  // scored; of rows that are means their ranges [kv_head][most] and biases.
  const size_t n_heads = sets.size(), most = memory.most, n_rows = memory.most_synthetic;
  auto* const positions = state.staged_memory_.as<int32_t>();
  auto* const counts = reinterpret_cast<uint32_t*>(positions + n_heads * most);
  uint32_t* const ranges = counts + 3 * n_heads;
  auto* const mean_biases = reinterpret_cast<float*>(ranges + 2 * n_heads * n_rows);
  // Others [kv_head][most]: keys, then values, then biases.
  float *const k = state.staged_synthetic_.as<float>(), *const v = k + n_heads * n_rows * heads.key_dim,
               *const biases = v + n_heads * n_rows * heads.value_dim;
  parallel_for(n_heads, [&](size_t kv_head, size_t) {
    const MemorySet& set = sets[kv_head];
    const size_t n = set.n_positions(), slot = policy.shape().slot(layer, kv_head);
    int32_t* const own = positions + kv_head * most;
    for (size_t i = 0; i < n; ++i) {
      own[i] = set.positions ? set.positions[i] : static_cast<int32_t>(set.range.begin + i);
    }
    counts[kv_head] = u32(n);
    counts[n_heads + kv_head] = u32(set.synthetic.count);
    counts[2 * n_heads + kv_head] = policy.is_scored(slot);
    const SyntheticRows& rows = set.synthetic;
    const size_t first = kv_head * n_rows;
    std::copy_n(rows.biases, rows.count, (has_means ? mean_biases : biases) + first);
    if (has_means) {
      for (size_t i = 0; i < rows.count; ++i) {
        ranges[2 * (first + i)] = u32(rows.means[i].begin);
        ranges[2 * (first + i) + 1] = u32(rows.means[i].end);
      }
      return;
    }
    std::copy_n(rows.k, rows.count * heads.key_dim, k + first * heads.key_dim);
    std::copy_n(rows.v, rows.count * heads.value_dim, v + first * heads.value_dim);
  });
  const size_t n_words = n_heads * (most + 3 + (has_means ? 3 * n_rows : 0));
  device_->upload(state.memory_.as<void>(), positions, n_words * sizeof(int32_t));
  // Where they are on the device.
  auto* const on_device = state.memory_.as<int32_t>();
  const auto* const counts_there = reinterpret_cast<const uint32_t*>(on_device + n_heads * most);
  memory.keys.positions = on_device;
  memory.keys.counts = counts_there;
  memory.keys.stride = u32(most);
  memory.synthetic_keys.counts = counts_there + n_heads;
  memory.is_scored = counts_there + 2 * n_heads;
  if (n_rows == 0) return memory;

  float *const k_there = state.synthetic_.as<float>(), *const v_there = k_there + (v - k);
  memory.synthetic = {k_there, v_there, u32(n_rows), DeviceCacheType::kF32, DeviceCacheType::kF32};
  if (has_means) {
    const uint32_t* const ranges_there = counts_there + (ranges - counts);
    memory.biases = reinterpret_cast<const float*>(ranges_there + 2 * n_heads * n_rows);
    const AttendArguments a = attend_arguments(chunk, layer);
    device_->launch("mean_rows",
                    MeanArguments{a.cache, a.heads, memory.keys, ranges_there, counts_there + n_heads,
                                  k_there, v_there, u32(n_rows)},
                    n_rows, n_heads, 1, kThreads, sizeof(MeanShared));
  } else {
    device_->upload(k_there, k, n_heads * n_rows * (heads.key_dim + heads.value_dim + 1) * sizeof(float));
    memory.biases = k_there + (biases - k);
  }
  return memory;
}

// Hands the column sums of a chunk to the rule.
void DeviceDecoder::observe(const Rows& chunk, size_t layer, const Memory& memory,
                            const std::vector<MemorySet>& sets) {
  DeviceState& state = chunk.state;
  SparsePolicy& policy = chunk.sequence.policy_of_call();
  const bool has_memory = chunk.position > 0;
  const size_t most = memory.most, n_parts = tile_dim_of(chunk, layer) > 0 ? column_parts(chunk.n) : 1;
  const size_t n_sums = sets.size() * (chunk.n + most);
  float* const own = state.staged_sums_.as<float>();
  device_->download(own, state.sums_.as<float>(), n_parts * n_sums * sizeof(float));
  device_->wait();
  const auto sums_of = [&](size_t first, size_t n) {
    for (size_t part = 1; part < n_parts; ++part) {
      for (size_t i = first; i < first + n; ++i) own[i] += own[part * n_sums + i];
    }
    return Span<const float>{own + first, n};
  };
  const PositionRange range{chunk.position, chunk.position + chunk.n};
  parallel_for(sets.size(), [&](size_t kv_head, size_t) {
    const size_t slot = policy.shape().slot(layer, kv_head);
    if (!policy.is_scored(slot)) return;
    policy.observe_intra(slot, range, sums_of(kv_head * chunk.n, chunk.n));
    if (!has_memory) return;
    const size_t first = sets.size() * chunk.n + kv_head * most;
    policy.observe_memory(slot, range, sets[kv_head], sums_of(first, sets[kv_head].n_positions()));
  });
}

}  // namespace edgeh2o::cuda
