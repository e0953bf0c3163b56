// Settings of the headwise rules: that of prompts and that of generated tokens.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "sparse/heavy_hitters.h"

namespace edgeh2o {

struct HeadwiseOptions {
  static constexpr size_t kFull = SIZE_MAX;  // budget of a head that reads its whole past, up to max_past

  std::vector<size_t> budgets;  // [n_slots] positions of a full memory set
  // Of query heads: of the seven that share a KV head in Qwen2.5-0.5B often one retrieves, and six do not.
  bool by_query_head = false;
  size_t n_local = 256;    // at most half of the budget
  size_t n_sinks = 4;      // at most a quarter of it
  float decay = 0.9f;      // factor of the old score at every chunk
  size_t page_size = 64;   // positions per landmark, 0: none
  float spread = 0.0f;     // of the spread of keys within pages, what landmarks count: see Landmarks
  size_t max_past = 8192;  // beyond it the cost of a chunk is bounded; 0: no limit
  size_t n_tail = 0;       // last queries of the prompt that read everything
  // Generated tokens go by budgets after a prompt of decode_from to decode_until tokens; after others they
  // read everything.
  size_t decode_from = SIZE_MAX, decode_until = SIZE_MAX;
  std::vector<size_t> decode_budgets;  // [n_kv_slots] theirs; empty: `budgets`, if those are of KV heads
  // Pages of kDecodePageSize positions that a head without a budget reads then, each generated token its own,
  // of prompts with at least twice as many; 0: all.
  size_t decode_pages = 1024;

  HeavyHitters::Forced forced(size_t capacity) const {
    return {std::min(n_sinks, capacity / 4), std::min(n_local, capacity / 2)};
  }
};

}  // namespace edgeh2o
