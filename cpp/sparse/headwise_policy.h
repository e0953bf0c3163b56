// Heavy hitters with a budget of its own for every layer and KV head, or query head: few heads carry most of
// the error that sparsity makes, and get large or unbounded budgets. A score is the decayed mean of the joint
// weights per query that saw the key; positions outside the memory are stood for by landmarks.
#pragma once

#include <cstdint>
#include <vector>

#include "base/arena.h"
#include "sparse/heavy_hitters.h"
#include "sparse/landmarks.h"
#include "sparse/page_choice.h"
#include "sparse/page_recall.h"
#include "sparse/sparse_policy.h"

namespace edgeh2o {

struct HeadwiseOptions {
  static constexpr size_t kFull = SIZE_MAX;  // budget of a head that reads its whole past, up to max_past

  std::vector<size_t> budgets;  // [n_slots] positions of a full memory set
  // [n_slots] those of generated tokens, at most as many, where they go by budgets; empty: the same. Heads
  // that have one for these alone go by what the last queries of the prompt read.
  std::vector<size_t> decode_budgets;
  // Of query heads: of the seven that share a KV head in Qwen2.5-0.5B often one retrieves, and six do not.
  bool by_query_head = false;
  size_t n_local = 256;    // at most half of the budget
  size_t n_sinks = 4;      // at most a quarter of it
  float decay = 0.9f;      // factor of the old score at every chunk
  size_t page_size = 64;   // positions per landmark, 0: none
  size_t max_past = 8192;  // beyond it the cost of a chunk is bounded; 0: no limit
  size_t n_tail = 0;       // last queries of the prompt that read everything
  // Generated tokens read, of a prompt of this length or more, what its last chunk and the memory sets hold,
  // and landmarks of the rest; SIZE_MAX: everything.
  size_t decode_from = SIZE_MAX;
  // Pages of kDecodePageSize positions that a head without a budget reads then, each generated token its own,
  // of prompts with at least twice as many; 0: all.
  size_t decode_pages = 1024;
};

class HeadwisePolicy final : public SparsePolicy {
 public:
  // Throws std::invalid_argument if a budget is 0 or decay is not in [0, 1].
  explicit HeadwisePolicy(const HeadwiseOptions& options);

  std::string describe() const override;
  bool splits_groups() const override { return options_.by_query_head; }
  void set_budgets(const std::vector<size_t>& budgets) override;
  PolicyNeeds needs(const PolicyShape& shape) const override;
  size_t state_bytes(const PolicyShape& shape) const override;
  void begin_prompt() override;
  bool is_scored(size_t slot) const override { return options_.budgets[slot] != HeadwiseOptions::kFull; }
  bool is_sampled(size_t slot) const override { return is_sampled(shape(), slot); }
  void observe_intra(size_t slot, PositionRange chunk, Span<const float> sums) override {
    hitters_.observe_intra(slot, chunk, sums);
  }
  void observe_memory(size_t slot, PositionRange chunk, const MemorySet&, Span<const float> sums) override {
    hitters_.observe_memory(slot, chunk, sums);
  }
  void observe_sample(size_t slot, size_t n_queries, Span<const float> sums) override;
  void restart(size_t slot, Span<const float> scores) override {
    if (is_scored(slot)) hitters_.restart(slot, scores);
  }
  bool chooses_in_decode() const override { return has_pages(shape()); }
  bool prepare_decode(size_t slot, const SelectionInput& input) override {
    return chooses_pages(slot) && pages_.prepare_decode(slot, input);
  }
  void score_decode(size_t slot, const SelectionInput& input, size_t part, size_t n_parts) override {
    if (chooses_pages(slot)) pages_.score_decode(slot, input, part, n_parts);
  }
  size_t choice_bytes(size_t slot) const override {
    return chooses_pages(slot) ? pages_.choice_bytes(slot) : 0;
  }
  size_t prompt_rows(const PolicyShape& shape, size_t slot) const override;
  MemorySet end_prompt(size_t slot, const SelectionInput& input) override;
  // Landmarks are made again from the cached rows.
  bool can_be_saved() const override { return true; }
  void save(size_t, ByteWriter& out) const override { hitters_.save(out); }
  void load(size_t n_tokens, ByteReader& in) override { hitters_.load(n_tokens, in); }
  MemorySet memory(size_t slot) const override;
  std::vector<float> scores(size_t slot) const override;

 protected:
  MemorySet select_memory(size_t slot, const SelectionInput& input) override;
  MemorySet select_decode(size_t slot, const SelectionInput& input) override;
  void allocate(const PolicyShape& shape) override;

 private:
  std::vector<size_t> capacities(const PolicyShape& shape) const;  // of chunks; 0: the whole past
  const std::vector<size_t>& decode_budgets() const {
    return options_.decode_budgets.empty() ? options_.budgets : options_.decode_budgets;
  }
  size_t decode_budget(size_t slot) const { return decode_budgets()[slot]; }
  // Whether the head has a budget in decode alone.
  bool is_sampled(const PolicyShape& shape, size_t slot) const {
    return !is_scored(slot) && decode_budget(slot) != HeadwiseOptions::kFull && ends_prompts(shape);
  }
  std::vector<bool> recalls(const PolicyShape& shape) const;  // full heads that may need pages
  bool ends_prompts(const PolicyShape& shape) const;
  bool has_pages(const PolicyShape& shape) const;
  // A head without a budget since the session began: set_budgets may have taken others away.
  bool chooses_pages(size_t slot) const { return has_pages_[slot] && !is_scored(slot); }
  size_t prompt_positions(const PolicyShape& shape, size_t slot) const;
  HeavyHitters::Forced forced(size_t capacity) const;
  void take_buffers(Arena& arena, const PolicyShape& shape);

  void check_budgets(const std::vector<size_t>& budgets) const;

  HeadwiseOptions options_;
  HeavyHitters hitters_;
  Landmarks landmarks_;
  PageRecall recall_;
  PageChoice pages_;
  Arena arena_;
  MemorySet* full_memory_ = nullptr;  // [n_slots] what the latest chunk of a full head read
  int32_t* prompt_memory_ = nullptr;  // [max_layer_slots][most positions of end_prompt]: layer by layer
  size_t max_prompt_positions_ = 0;
  std::vector<bool> has_pages_;  // [n_slots]
};

}  // namespace edgeh2o
