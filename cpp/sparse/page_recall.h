// The query-aware choice of a head that reads "everything": once its past is longer than max_past, a chunk
// reads the pages that its own queries ask for. A page is known by the elementwise bounds of its keys, which
// bound every logit (Quest, Tang et al. 2024): q . k <= [max(q, 0); min(q, 0)] . [k_max; k_min]. The score of
// a page is the sum, over the chunk's queries and the query heads of the group, of the square of that bound's
// softmax over the pages: one query that needs a page outweighs many that look everywhere. Nothing is dropped
// for good: the next chunk chooses among all pages again. Looking at a page costs a query as much as reading
// a key, so their number is bounded: pages double in size when there are more than twice as many as max_past
// has.
#pragma once

#include <algorithm>
#include <vector>

#include "base/arena.h"
#include "sparse/sparse_policy.h"

namespace edgeh2o {

class PageRecall {
 public:
  static constexpr size_t kPageSize = 16;  // positions of the smallest pages

  // max_past 0: no limit.
  explicit PageRecall(size_t max_past) : max_past_(max_past) {}

  // Whether a past can be longer than the limit at all.
  bool is_needed(const PolicyShape& shape) const { return max_past_ > 0 && max_past_ < shape.max_context; }
  bool is_needed(size_t n_past) const { return max_past_ > 0 && max_past_ < n_past; }
  size_t max_pages(const PolicyShape& shape) const;
  // has_recall[slot]: the slot may be asked for a selection.
  void take_buffers(Arena& arena, const PolicyShape& shape, const std::vector<bool>& has_recall);
  void begin_prompt();

  // About max_past positions (whole pages): the first n_sinks, the last n_local before the chunk, and the
  // pages with the highest scores; ties go to the lower page.
  MemorySet select(size_t slot, const SelectionInput& input, size_t n_sinks, size_t n_local);

 private:
  struct Slot {
    float* bounds = nullptr;       // [max_pages][2][key_dim] maxima, then minima
    int32_t* positions = nullptr;  // [capacity]
    size_t n_pages = 0;            // that have their bounds
    size_t page_size = kPageSize;
  };

  size_t most_pages() const { return 2 * std::max<size_t>(max_past_ / kPageSize, 1); }
  size_t capacity(const PolicyShape& shape) const;
  void join_pages(Slot& slot, size_t key_dim) const;
  void add_pages(Slot& slot, size_t index, const SelectionInput& input) const;
  size_t choose_pages(Slot& slot, size_t index, const SelectionInput& input, PositionRange pages,
                      size_t n_room) const;

  size_t max_past_;
  PolicyShape shape_;
  Slot* slots_ = nullptr;  // [n_slots]
  // The slots of one layer run in parallel.
  float* scores_ = nullptr;   // [max_layer_slots][max_pages]
  int32_t* pages_ = nullptr;  // [max_layer_slots][max_pages]
  float* row_ = nullptr;      // [max_layer_slots][max_key_dim]
};

}  // namespace edgeh2o
