// Sums of the keys and values of pages, once per KV head: every memory set that reads it, of prompts or of
// generated tokens, makes its landmarks of the same ones. The number of pages is bounded: in a long past,
// neighbours of one size become one page, the oldest first, so that recent pages are the finer ones. How far
// back a page reaches depends on the length of the past alone, so whoever comes first adds what is missing.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "base/arena.h"
#include "sparse/sparse_policy.h"

namespace edgeh2o {

class PageSums {
 public:
  struct Page {
    int32_t end;  // one past its last position; it begins where the page before it ends
    int32_t row;  // of its sums
  };
  struct Slot {
    float* sums = nullptr;     // [max_rows][key_dim + value_dim] of the keys and of the values of a page
    Page* pages = nullptr;     // [max_rows], oldest first
    float* scatter = nullptr;  // [key_dim] squared distances of keys from the mean of their page, added up
    size_t n_pages = 0;        // that have their sums, unless whoever asks takes means
  };

  // page_size 0: no pages. They grow once the past is longer than n_fine positions; 0: never.
  PageSums(size_t page_size, size_t n_fine, bool has_scatter)
      : page_size_(page_size), n_fine_(n_fine), has_scatter_(has_scatter) {}

  size_t page_size() const { return page_size_; }
  size_t max_rows(const PolicyShape& shape) const;
  // has_pages[slot]: the KV head is asked for any.
  void take_buffers(Arena& arena, const PolicyShape& kv_shape, const std::vector<bool>& has_pages);
  void begin_prompt();

  // The pages that lie before the chunk as a whole, of a slot of kv_shape. May be called for one slot by
  // several threads, with the same input; nothing changes until there is another chunk.
  const Slot& extend(size_t kv_slot, const SelectionInput& input);

 private:
  int32_t join_pages(Slot& slot, size_t width) const;
  void add_pages(Slot& slot, const SelectionInput& input) const;
  void add_scatter(Slot& slot, const SelectionInput& input, size_t begin, const float* sums) const;

  // So many rows hold pages of 2^32 positions and always have two neighbours of one size.
  static constexpr size_t kMinRows = 32;

  size_t page_size_, n_fine_;
  bool has_scatter_;
  PolicyShape shape_;
  Slot* slots_ = nullptr;  // [n_slots]
  // [max_layer_slots] the memory sets of a KV head come at once.
  std::unique_ptr<std::mutex[]> locks_;
};

}  // namespace edgeh2o
