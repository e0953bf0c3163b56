#include "sparse/page_choice.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>

namespace edgeh2o {

BestScores::BestScores(const float* scores, size_t n, size_t n_kept, uint64_t* ranks) : ranks_(ranks) {
  // By score, then by lower index; NaN of a broken model keeps the order total.
  for (size_t i = 0; i < n; ++i) {
    uint32_t bits;
    std::memcpy(&bits, scores + i, sizeof(bits));
    bits ^= bits >> 31 ? UINT32_MAX : uint32_t{1} << 31;
    ranks[i] = uint64_t{bits} << 32 | ~static_cast<uint32_t>(i);
  }
  if (n_kept >= n) return;
  uint64_t* by_rank = ranks + n;
  std::copy_n(ranks, n, by_rank);
  std::nth_element(by_rank, by_rank + n_kept - 1, by_rank + n, std::greater<>());
  lowest_ = by_rank[n_kept - 1];
}

size_t list_pages(const BestScores& kept, size_t n_pages, size_t page_size, size_t end, int32_t* out) {
  int32_t* next = out;
  const auto append = [&next](size_t first, size_t last) {
    while (first < last) *next++ = static_cast<int32_t>(first++);
  };
  for (size_t page = 0; page < n_pages; ++page) {
    if (kept.has(page)) append(page * page_size, (page + 1) * page_size);
  }
  append(n_pages * page_size, end);
  return static_cast<size_t>(next - out);
}

void PageChoice::take_buffers(Arena& arena, const PolicyShape& shape, const std::vector<bool>& has_pages) {
  shape_ = shape;
  bounds_.take_buffers(arena, shape, has_pages);
  const bool is_any = std::find(has_pages.begin(), has_pages.end(), true) != has_pages.end();
  max_group_ = max_query_dim_ = 0;
  for (const SlotShape& slot : shape.slots) {
    max_group_ = std::max(max_group_, slot.group_size);
    max_query_dim_ = std::max(max_query_dim_, slot.group_size * slot.key_dim);
  }
  const size_t n_heads = is_any ? shape.max_kv_heads : 0;
  queries_ = arena.take<float>(n_heads * 2 * max_query_dim_);
  scores_ = arena.take<float>(n_heads * max_group_ * max_pages());
  ranks_ = arena.take<uint64_t>(n_heads * 2 * max_pages());
  positions_ = arena.take<int32_t>(n_heads * shape.max_context);
}

bool PageChoice::prepare_decode(size_t slot, const SelectionInput& input) {
  if (!is_worth(slot)) return false;
  const SlotShape& head = shape_.slots[slot];
  const size_t dim = head.key_dim;
  float* out = queries(head.kv_head);
  const float* q = input.queries.row(0);
  for (size_t g = 0; g < head.group_size; ++g, out += 2 * dim, q += dim) {
    for (size_t d = 0; d < dim; ++d) out[d] = std::max(q[d], 0.0f), out[dim + d] = std::min(q[d], 0.0f);
  }
  return true;
}

void PageChoice::score_decode(size_t slot, const SelectionInput& input, size_t part, size_t n_parts) {
  if (!is_worth(slot)) return;
  const SlotShape& head = shape_.slots[slot];
  const size_t n_blocks = bounds_.n_blocks(slot), first = part * n_blocks / n_parts,
               end = (part + 1) * n_blocks / n_parts, width = 2 * head.key_dim, stride = max_pages();
  if (first == end) return;
  float* out = scores(head.kv_head) + first * PageBounds::kBlockPages;
  input.page_kernels->score_blocks(out, stride, queries(head.kv_head), width, head.group_size, nullptr, width,
                                   bounds_.block(slot, first), end - first, width);
  const size_t n_pages = (end - first) * PageBounds::kBlockPages;
  for (size_t g = 1; g < head.group_size; ++g) {
    const float* others = out + g * stride;
    for (size_t i = 0; i < n_pages; ++i) out[i] = std::max(out[i], others[i]);
  }
}

MemorySet PageChoice::select_decode(size_t slot, const SelectionInput& input) {
  if (!is_worth(slot)) return MemorySet::all_of({0, input.chunk.begin});
  const size_t kv_head = shape_.slots[slot].kv_head,
               n_pages = bounds_.n_blocks(slot) * PageBounds::kBlockPages;
  float* all = scores(kv_head);
  all[0] = std::numeric_limits<float>::infinity();  // the sinks of attention
  const BestScores kept(all, n_pages, n_kept_, ranks_ + kv_head * 2 * max_pages());
  int32_t* positions = positions_ + kv_head * shape_.max_context;
  return MemorySet::list(positions,
                         list_pages(kept, n_pages, bounds_.page_size(), input.chunk.begin, positions));
}

}  // namespace edgeh2o
