// Heavy hitters with a budget of its own for every layer and KV head, or query head: few heads carry most of
// the error that sparsity makes, and get large or unbounded budgets. A score is the decayed mean of the joint
// weights per query that saw the key; positions outside the memory are stood for by landmarks. Generated
// tokens go by HeadwiseDecode.
#pragma once

#include <cstdint>
#include <vector>

#include "base/arena.h"
#include "sparse/headwise_decode.h"
#include "sparse/headwise_options.h"
#include "sparse/heavy_hitters.h"
#include "sparse/landmarks.h"
#include "sparse/page_recall.h"
#include "sparse/page_sums.h"
#include "sparse/sparse_policy.h"

namespace edgeh2o {

class HeadwisePolicy final : public SparsePolicy {
 public:
  // Throws std::invalid_argument if a budget is 0 or decay is not in [0, 1].
  explicit HeadwisePolicy(const HeadwiseOptions& options);

  std::string describe() const override;
  bool splits_groups() const override { return options_.by_query_head; }
  void set_budgets(const std::vector<size_t>& budgets, const std::vector<size_t>& decode_budgets) override;
  PolicyNeeds needs(const PolicyShape& shape) const override;
  size_t state_bytes(const PolicyShape& shape) const override;
  size_t resident_bytes() const override { return arena_.resident_bytes(); }
  void begin_prompt() override;
  bool is_scored(size_t slot) const override { return options_.budgets[slot] != HeadwiseOptions::kFull; }
  void observe_intra(size_t slot, PositionRange chunk, Span<const float> sums) override {
    hitters_.observe_intra(slot, chunk, sums);
  }
  void observe_memory(size_t slot, PositionRange chunk, const MemorySet&, Span<const float> sums) override {
    hitters_.observe_memory(slot, chunk, sums);
  }
  void restart(size_t slot, Span<const float> scores) override {
    if (is_scored(slot)) hitters_.restart(slot, scores);
  }

  bool is_sampled(size_t slot) const override { return decode_.is_sampled(slot); }
  void observe_sample(size_t slot, size_t n_queries, Span<const float> sums) override {
    decode_.observe_sample(slot, n_queries, sums);
  }
  bool chooses_in_decode() const override { return decode_.chooses_in_decode(); }
  bool prepare_decode(size_t slot, const SelectionInput& input) override {
    return decode_.prepare_decode(slot, input);
  }
  void score_decode(size_t slot, const SelectionInput& input, size_t part, size_t n_parts) override {
    decode_.score_decode(slot, input, part, n_parts);
  }
  size_t choice_bytes(size_t slot) const override { return decode_.choice_bytes(slot); }
  size_t prompt_rows(const PolicyShape& kv_shape, size_t slot) const override {
    return decode_.prompt_rows(kv_shape, slot);
  }
  MemorySet end_prompt(size_t slot, const SelectionInput& input) override {
    return decode_.end_prompt(slot, input);
  }
  PromptLengths rounded_prompts(size_t slot) const override { return decode_.rounded_prompts(slot); }

  // Landmarks are made again from the cached rows.
  bool can_be_saved() const override { return true; }
  void save(size_t, ByteWriter& out) const override;
  void load(size_t n_tokens, ByteReader& in) override;
  MemorySet memory(size_t slot) const override;
  std::vector<float> scores(size_t slot) const override;

 protected:
  MemorySet select_memory(size_t slot, const SelectionInput& input) override;
  MemorySet select_decode(size_t slot, const SelectionInput& input) override {
    return decode_.select_decode(slot, input);
  }
  void allocate(const PolicyShape& shape) override;

 private:
  std::vector<size_t> capacities(const PolicyShape& shape) const;  // of chunks; 0: the whole past
  std::vector<bool> recalls(const PolicyShape& shape) const;       // full heads that may need pages
  void take_buffers(Arena& arena, const PolicyShape& shape);
  void check_budgets(const std::vector<size_t>& budgets) const;

  HeadwiseOptions options_;
  HeavyHitters hitters_;
  PageSums sums_;
  Landmarks landmarks_;
  PageRecall recall_;
  HeadwiseDecode decode_;
  Arena arena_;
  MemorySet* full_memory_ = nullptr;  // [n_slots] what the latest chunk of a full head read
};

}  // namespace edgeh2o
