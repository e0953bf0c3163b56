// RocketKV (Behnam et al. 2025, arXiv 2502.14051), from its formulas. Prompts are read dense. Stage 1, once
// at the end of a prompt: the prompt_budget rows of a KV head that the last `window` queries voted for, or
// lie next to such a row, are kept; as a filter, so that a later prompt begins with all of them. Stage 2, for
// every generated token: of pages of kept rows, known by the bounds of their keys, the topk best by the topr
// channels where the query is largest; besides what follows the last whole block of pages, and all that was
// generated.
//
// The vote is that of the last chunk's queries, where that has fewer than `window`. Logits are scaled by
// 1 / sqrt(key_dim), and not capped, in the choice of pages.
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <vector>

#include "base/check.h"
#include "sparse/page_choice.h"
#include "sparse/policy_registry.h"

namespace edgeh2o {
namespace {

struct RocketKvOptions {
  size_t prompt_budget = 2048, window = 32;
  size_t kernel = 63;  // of the pooling, odd
  size_t page_size = 4, topk = 64, topr = 128;
};

class RocketKvPolicy final : public SparsePolicy {
 public:
  explicit RocketKvPolicy(const RocketKvOptions& options) : options_(options), bounds_(options.page_size) {}

  std::string describe() const override {
    return "rocketkv, " + std::to_string(options_.prompt_budget) + " rows by the last " +
           std::to_string(options_.window) + " queries pooled by " + std::to_string(options_.kernel) + ", " +
           std::to_string(options_.topk) + " pages of " + std::to_string(options_.page_size) + " by " +
           std::to_string(options_.topr) + " channels";
  }
  PolicyNeeds needs(const PolicyShape& shape) const override {
    PolicyNeeds needs;
    needs.column_sums = ColumnSums::kJoint;
    needs.query_weights = QueryWeights::kLastQueries;
    needs.n_last_queries = options_.window;
    needs.max_scored_memory = shape.max_context;
    needs.ends_prompts = needs.ends_by_scores = true;
    return needs;
  }
  size_t state_bytes(const PolicyShape& shape) const override {
    Arena arena;
    RocketKvPolicy(options_).take_buffers(arena, shape);
    return arena.used();
  }
  size_t resident_bytes() const override { return arena_.resident_bytes(); }
  void begin_prompt() override {
    for (size_t i = 0; i < shape().n_slots(); ++i) {
      slots_[i].n_past = slots_[i].n_voted = slots_[i].n_kept = slots_[i].n_prompt = 0;
    }
    bounds_.begin_prompt();
  }
  void observe_intra(size_t slot, PositionRange chunk, Span<const float> sums) override {
    std::copy_n(sums.data, sums.size, slots_[slot].votes + chunk.begin);
    slots_[slot].n_voted = chunk.end;
  }
  void observe_memory(size_t slot, PositionRange, const MemorySet&, Span<const float> sums) override {
    std::copy_n(sums.data, sums.size, slots_[slot].votes);
  }
  size_t choice_bytes(size_t slot) const override {
    return has_pages(slot) ? bounds_.n_bytes(slot, std::min(options_.topr, shape().slots[slot].key_dim)) : 0;
  }
  bool chooses_in_decode() const override { return true; }
  MemorySet end_prompt(size_t slot, const SelectionInput& input) override;
  bool prepare_decode(size_t slot, const SelectionInput& input) override;
  void score_decode(size_t slot, const SelectionInput& input, size_t part, size_t n_parts) override;

  bool can_be_saved() const override { return true; }
  void save(size_t, ByteWriter& out) const override {
    for (size_t i = 0; i < shape().n_slots(); ++i) {
      out.put<uint64_t>(slots_[i].n_voted);
      out.put_array(slots_[i].votes, slots_[i].n_voted);
    }
  }
  void load(size_t n_tokens, ByteReader& in) override {
    for (size_t i = 0; i < shape().n_slots(); ++i) {
      Slot& slot = slots_[i];
      slot.n_voted = in.take_at_most<uint64_t>(n_tokens, "the number of votes");
      in.take_array(slot.votes, slot.n_voted);
      EH2O_CHECK(std::all_of(slot.votes, slot.votes + slot.n_voted,
                             [](float vote) { return std::isfinite(vote) && vote >= 0.0f; }),
                 "a vote is not a finite number >= 0");
    }
  }
  MemorySet memory(size_t slot) const override { return MemorySet::all_of({0, slots_[slot].n_past}); }

 protected:
  MemorySet select_memory(size_t slot, const SelectionInput& input) override {
    slots_[slot].n_past = input.chunk.begin;
    return memory(slot);
  }
  MemorySet select_decode(size_t slot, const SelectionInput& input) override;
  void allocate(const PolicyShape& shape) override {
    arena_ = Arena::of([&](Arena& arena) { take_buffers(arena, shape); });
  }

 private:
  struct Slot {
    size_t n_past = 0;       // of the latest chunk
    float* votes = nullptr;  // [max_context] of the latest chunk's last queries
    size_t n_voted = 0;
    int32_t* kept = nullptr;  // [min(prompt_budget, max_context)] ascending
    size_t n_kept = 0;        // 0: all of the prompt
    size_t n_prompt = 0;
  };

  void keep_rows(Slot& slot, size_t kv_head) const;
  bool has_pages(size_t slot) const { return n_pages(slot) > options_.topk; }
  size_t n_pages(size_t slot) const { return bounds_.n_blocks(slot) * PageBounds::kBlockPages; }
  size_t max_pages(const PolicyShape& shape) const {
    return bounds_.max_blocks(shape) * PageBounds::kBlockPages;
  }
  void take_buffers(Arena& arena, const PolicyShape& shape);
  float* logits(size_t kv_head) const { return logits_ + kv_head * (max_group_ + 1) * max_pages(shape()); }

  RocketKvOptions options_;
  PageBounds bounds_;
  Arena arena_;
  Slot* slots_ = nullptr;  // [n_slots]
  size_t max_group_ = 0;
  // The slots of one layer run in parallel: [max_layer_slots] each.
  float* queries_ = nullptr;      // [max_group][2 * max_key_dim]
  int32_t* channels_ = nullptr;   // [max_key_dim] of the upper bounds, or key_dim on: of the lower ones
  size_t* n_channels_ = nullptr;  // 1
  float* pooled_ = nullptr;       // [max_context]
  float* logits_ = nullptr;       // [max_group + 1][max_pages], the last for their mean
  uint32_t* keys_ = nullptr;      // [2][max_context]
  int32_t* positions_ = nullptr;  // [max_context]
};

void RocketKvPolicy::take_buffers(Arena& arena, const PolicyShape& shape) {
  slots_ = arena.take<Slot>(shape.n_slots());
  bounds_.take_buffers(arena, shape, std::vector<bool>(shape.n_slots(), true));
  max_group_ = 0;
  for (size_t i = 0; i < shape.n_slots(); ++i) {
    Slot slot;
    slot.votes = arena.take<float>(shape.max_context);
    slot.kept = arena.take<int32_t>(std::min(options_.prompt_budget, shape.max_context));
    max_group_ = std::max(max_group_, shape.slots[i].group_size);
    if (slots_) slots_[i] = slot;
  }
  queries_ = arena.take<float>(shape.max_layer_slots * max_group_ * 2 * shape.max_key_dim);
  channels_ = arena.take<int32_t>(shape.max_layer_slots * shape.max_key_dim);
  n_channels_ = arena.take<size_t>(shape.max_layer_slots);
  pooled_ = arena.take<float>(shape.max_layer_slots * std::max(shape.max_context, shape.max_key_dim));
  logits_ = arena.take<float>(shape.max_layer_slots * (max_group_ + 1) * max_pages(shape));
  keys_ = arena.take<uint32_t>(shape.max_layer_slots * 2 * std::max(shape.max_context, shape.max_key_dim));
  positions_ = arena.take<int32_t>(shape.max_layer_slots * shape.max_context);
}

// Stage 1.
void RocketKvPolicy::keep_rows(Slot& slot, size_t kv_head) const {
  const size_t stride = std::max(shape().max_context, shape().max_key_dim),
               n_past = slot.n_prompt - options_.window, half = options_.kernel / 2;
  float* pooled = pooled_ + kv_head * stride;
  for (size_t i = 0; i < n_past; ++i) {
    const size_t first = i - std::min(i, half), end = std::min(i + half + 1, n_past);
    pooled[i] = *std::max_element(slot.votes + first, slot.votes + end);
  }
  slot.n_kept = 0;
  const BestScores best(pooled, n_past, options_.prompt_budget - options_.window,
                        keys_ + kv_head * 2 * stride);
  best.for_each([&](size_t row) { slot.kept[slot.n_kept++] = static_cast<int32_t>(row); });
  for (size_t row = n_past; row < slot.n_prompt; ++row) slot.kept[slot.n_kept++] = static_cast<int32_t>(row);
}

MemorySet RocketKvPolicy::end_prompt(size_t slot_idx, const SelectionInput& input) {
  Slot& slot = slots_[slot_idx];
  const size_t n_tokens = input.chunk.begin;
  slot.n_prompt = n_tokens;
  slot.n_kept = 0;
  // Without votes of all rows, as after tokens that were not scored, nothing is left out.
  if (n_tokens > options_.prompt_budget && slot.n_voted == n_tokens) {
    keep_rows(slot, shape().slots[slot_idx].index);
  }
  bounds_.rebuild(slot_idx, input, slot.n_kept > 0 ? slot.kept : nullptr,
                  slot.n_kept > 0 ? slot.n_kept : n_tokens);
  return MemorySet::all_of({0, n_tokens});
}

bool RocketKvPolicy::prepare_decode(size_t slot, const SelectionInput& input) {
  if (!has_pages(slot)) return false;
  const SlotShape& head = shape().slots[slot];
  const size_t dim = head.key_dim, kv_head = head.index;
  const size_t stride = std::max(shape().max_context, shape().max_key_dim);
  const float* q = input.queries.row(0);
  float *sizes = pooled_ + kv_head * stride, *out = queries_ + kv_head * max_group_ * 2 * shape().max_key_dim;
  for (size_t d = 0; d < dim; ++d) {
    sizes[d] = 0.0f;
    for (size_t g = 0; g < head.group_size; ++g) sizes[d] += std::fabs(q[g * dim + d]);
  }
  int32_t* channels = channels_ + kv_head * shape().max_key_dim;
  size_t n_channels = 0;
  const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
  const BestScores best(sizes, dim, std::min(options_.topr, dim), keys_ + kv_head * 2 * stride);
  best.for_each([&](size_t d) {
    float sum = 0.0f;
    for (size_t g = 0; g < head.group_size; ++g) sum += q[g * dim + d];
    const size_t channel = sum > 0.0f ? d : dim + d;
    for (size_t g = 0; g < head.group_size; ++g) out[g * 2 * dim + channel] = scale * q[g * dim + d];
    channels[n_channels++] = static_cast<int32_t>(channel);
  });
  std::sort(channels, channels + n_channels);
  n_channels_[kv_head] = n_channels;
  return true;
}

void RocketKvPolicy::score_decode(size_t slot, const SelectionInput& input, size_t part, size_t n_parts) {
  if (!has_pages(slot)) return;
  const SlotShape& head = shape().slots[slot];
  const size_t n_blocks = bounds_.n_blocks(slot), first = part * n_blocks / n_parts,
               end = (part + 1) * n_blocks / n_parts, width = 2 * head.key_dim;
  input.page_kernels->score_blocks(logits(head.index) + first * PageBounds::kBlockPages, max_pages(shape()),
                                   queries_ + head.index * max_group_ * 2 * shape().max_key_dim, width,
                                   head.group_size, channels_ + head.index * shape().max_key_dim,
                                   n_channels_[head.index], bounds_.block(slot, first), end - first, width);
}

MemorySet RocketKvPolicy::select_decode(size_t slot_idx, const SelectionInput& input) {
  const Slot& slot = slots_[slot_idx];
  const SlotShape& head = shape().slots[slot_idx];
  const size_t n_past = input.chunk.begin, n_rows = slot.n_kept > 0 ? slot.n_kept : slot.n_prompt;
  if (slot.n_kept == 0 && !has_pages(slot_idx)) return MemorySet::all_of({0, n_past});
  int32_t* const positions = positions_ + head.index * shape().max_context;
  int32_t* next = positions;
  const auto append = [&](size_t first, size_t end) {
    for (size_t i = first; i < end; ++i) *next++ = slot.n_kept > 0 ? slot.kept[i] : static_cast<int32_t>(i);
  };
  size_t n_in_pages = 0;
  if (has_pages(slot_idx)) {
    const size_t pages = n_pages(slot_idx), stride = max_pages(shape());
    float *logits = this->logits(head.index), *mean = logits + max_group_ * stride;
    std::fill_n(mean, pages, 0.0f);
    for (size_t g = 0; g < head.group_size; ++g, logits += stride) {
      const float largest = *std::max_element(logits, logits + pages);
      float sum = 0.0f;
      for (size_t i = 0; i < pages; ++i) sum += logits[i] = std::exp(logits[i] - largest);
      for (size_t i = 0; i < pages; ++i) mean[i] += logits[i] / sum;
    }
    mean[0] = std::numeric_limits<float>::infinity();
    const size_t stride_of_keys = std::max(shape().max_context, shape().max_key_dim);
    const BestScores best(mean, pages, options_.topk, keys_ + head.index * 2 * stride_of_keys);
    best.for_each([&](size_t page) { append(page * options_.page_size, (page + 1) * options_.page_size); });
    n_in_pages = pages * options_.page_size;
  }
  append(n_in_pages, n_rows);
  for (size_t i = slot.n_prompt; i < n_past; ++i) *next++ = static_cast<int32_t>(i);
  return MemorySet::list(positions, static_cast<size_t>(next - positions));
}

const PolicyRegistration kRocketKvRegistration(
    "rocketkv", {}, [](PolicyOptions& settings) -> std::shared_ptr<SparsePolicy> {
      RocketKvOptions options;
      options.prompt_budget = settings.count("prompt_budget", options.prompt_budget);
      options.window = settings.count("window", options.window);
      options.kernel = settings.count("kernel", options.kernel);
      options.page_size = settings.count("page_size", options.page_size);
      options.topk = settings.count("topk", options.topk);
      options.topr = settings.count("topr", options.topr);
      EH2O_CHECK(options.window > 0 && options.window < options.prompt_budget, "a window of ", options.window,
                 " does not lie in 1 to the prompt budget of ", options.prompt_budget, " less one");
      EH2O_CHECK(options.kernel % 2 == 1, "a kernel of ", options.kernel, " is not odd");
      EH2O_CHECK(options.page_size > 0 && options.topk > 0 && options.topr > 0,
                 "page_size, topk and topr must be at least 1");
      return std::make_shared<RocketKvPolicy>(options);
    });

}  // namespace
}  // namespace edgeh2o
