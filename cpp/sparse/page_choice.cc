#include "sparse/page_choice.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace edgeh2o {

// Digit by digit from the highest: a sort by comparisons takes four times as long.
BestScores::BestScores(const float* scores, size_t n, size_t n_kept, uint32_t* keys)
    : keys_(keys), n_(n), n_equal_(n) {
  constexpr uint32_t kSign = uint32_t{1} << 31;
  for (size_t i = 0; i < n; ++i) {
    uint32_t bits;
    std::memcpy(&bits, scores + i, sizeof(bits));
    keys[i] = bits & kSign ? ~bits : bits | kSign;
  }
  if (n_kept >= n) return;
  constexpr uint32_t kDigitBits = 11, kDigits = uint32_t{1} << kDigitBits;
  uint32_t* rest = keys + n;  // those that share the digits so far
  std::copy_n(keys, n, rest);
  size_t n_rest = n;
  n_equal_ = n_kept;
  for (const uint32_t shift : {21u, 10u, 0u}) {
    const auto digit = [shift](uint32_t key) { return key >> shift & (kDigits - 1); };
    uint32_t counts[kDigits] = {};
    for (size_t i = 0; i < n_rest; ++i) ++counts[digit(rest[i])];
    uint32_t found = kDigits - 1;
    while (counts[found] < n_equal_) n_equal_ -= counts[found--];
    lowest_ |= found << shift;
    size_t n_found = 0;
    for (size_t i = 0; i < n_rest; ++i) {
      if (digit(rest[i]) == found) rest[n_found++] = rest[i];
    }
    n_rest = n_found;
  }
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
  const size_t n_heads = is_any ? shape.max_layer_slots : 0;
  queries_ = arena.take<float>(n_heads * 2 * max_query_dim_);
  scores_ = arena.take<float>(n_heads * max_group_ * max_pages());
  keys_ = arena.take<uint32_t>(n_heads * 2 * max_pages());
  positions_ = arena.take<int32_t>(n_heads * shape.max_context);
}

bool PageChoice::prepare_decode(size_t slot, const SelectionInput& input) {
  if (!is_worth(slot)) return false;
  const SlotShape& head = shape_.slots[slot];
  const size_t dim = head.key_dim;
  float* out = queries(head.index);
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
  float* out = scores(head.index) + first * PageBounds::kBlockPages;
  input.page_kernels->score_blocks(out, stride, queries(head.index), width, head.group_size, nullptr, width,
                                   bounds_.block(slot, first), end - first, width);
  const size_t n_pages = (end - first) * PageBounds::kBlockPages;
  for (size_t g = 1; g < head.group_size; ++g) {
    const float* others = out + g * stride;
    for (size_t i = 0; i < n_pages; ++i) out[i] = std::max(out[i], others[i]);
  }
}

MemorySet PageChoice::select_decode(size_t slot, const SelectionInput& input) {
  if (!is_worth(slot)) return MemorySet::all_of({0, input.chunk.begin});
  const size_t kv_head = shape_.slots[slot].index, n_pages = bounds_.n_blocks(slot) * PageBounds::kBlockPages;
  float* all = scores(kv_head);
  all[0] = std::numeric_limits<float>::infinity();  // the sinks of attention
  int32_t* const positions = positions_ + kv_head * shape_.max_context;
  int32_t* next = positions;
  const auto append = [&next](size_t first, size_t end) {
    while (first < end) *next++ = static_cast<int32_t>(first++);
  };
  const size_t page_size = bounds_.page_size();
  BestScores(all, n_pages, n_kept_, keys_ + kv_head * 2 * max_pages()).for_each([&](size_t page) {
    append(page * page_size, (page + 1) * page_size);
  });
  append(n_pages * page_size, input.chunk.begin);
  return MemorySet::list(positions, static_cast<size_t>(next - positions));
}

}  // namespace edgeh2o
