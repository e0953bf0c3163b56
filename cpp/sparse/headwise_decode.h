// What generated tokens read of a prompt by budgets per layer and KV head, however the prompt was read: of
// all positions those that its last queries gave most, and landmarks of the rest; heads without a budget
// choose pages, each token its own. Sets that heavy hitters have gathered chunk by chunk lose more
// (docs/quality.md). Slots are those of KV heads.
#pragma once

#include <vector>

#include "base/arena.h"
#include "sparse/headwise_options.h"
#include "sparse/heavy_hitters.h"
#include "sparse/landmarks.h"
#include "sparse/page_choice.h"
#include "sparse/sparse_policy.h"

namespace edgeh2o {

class HeadwiseDecode {
 public:
  // Throws std::invalid_argument if a budget is 0, or if there are none of KV heads.
  // sums: of the pages of landmarks, which prompts have too.
  HeadwiseDecode(const HeadwiseOptions& options, PageSums& sums);

  // Whether generated tokens go by budgets. Where every head reads its whole past nothing is known of them,
  // and they read it too.
  bool is_used(const PolicyShape& shape) const;
  void add_needs(const PolicyShape& shape, PolicyNeeds& needs) const;

  // [n_slots] which need pages with sums.
  std::vector<bool> landmark_slots(const PolicyShape& shape) const;
  void take_buffers(Arena& arena, const PolicyShape& shape);
  void begin_prompt();

  // As SparsePolicy's; empty: generated tokens read everything. None may be larger than those before.
  void set_budgets(const std::vector<size_t>& budgets);
  bool chooses_in_decode() const { return chooses_; }  // of the session that took the buffers
  // As the hooks of SparsePolicy with these names.
  bool is_sampled(size_t slot) const { return is_used_ && budgets_[slot] != HeadwiseOptions::kFull; }
  void observe_sample(size_t slot, size_t n_queries, Span<const float> sums);
  size_t prompt_rows(const PolicyShape& shape, size_t slot) const;
  MemorySet end_prompt(size_t slot, const SelectionInput& input);
  PromptLengths rounded_prompts(size_t slot) const;
  bool prepare_decode(size_t slot, const SelectionInput& input) {
    return has_pages_[slot] && pages_.prepare_decode(slot, input);
  }
  void score_decode(size_t slot, const SelectionInput& input, size_t part, size_t n_parts) {
    if (has_pages_[slot]) pages_.score_decode(slot, input, part, n_parts);
  }
  MemorySet select_decode(size_t slot, const SelectionInput& input) {
    return has_pages_[slot] ? pages_.select_decode(slot, input) : MemorySet::all_of({0, input.chunk.begin});
  }
  size_t choice_bytes(size_t slot) const { return has_pages_[slot] ? pages_.choice_bytes(slot) : 0; }
  // Landmarks and pages are made again from the cached rows. A session of another context may have no use for
  // what this one notes, and the other way round: prompts that both have room for are read whole.
  void save(ByteWriter& out) const;
  void load(size_t n_tokens, ByteReader& in);

 private:
  // Of prompts after which tokens go by budgets.
  PromptLengths served() const { return {options_.decode_from, options_.decode_until}; }
  bool has_budgets() const;
  bool has_pages(const PolicyShape& shape) const;
  size_t capacity(const PolicyShape& shape, size_t slot) const;  // 0: the whole prompt

  HeadwiseOptions options_;
  std::vector<size_t> budgets_;  // [n_slots]
  bool is_used_ = false, chooses_ = false;
  HeavyHitters hitters_;
  Landmarks landmarks_;
  PageChoice pages_;
  PolicyShape shape_;
  int32_t* positions_ = nullptr;  // [max_layer_slots][most of a slot]: layer by layer
  size_t max_positions_ = 0;
  std::vector<bool> has_pages_;  // [n_slots]
};

}  // namespace edgeh2o
