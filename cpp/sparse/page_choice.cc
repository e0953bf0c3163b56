#include "sparse/page_choice.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <utility>

namespace edgeh2o {

namespace {

// So many scores say about where the lowest that is kept lies.
constexpr size_t kSamples = 256, kLeastToSample = 4 * kSamples;

// Numbers that order as the scores do.
uint32_t order_of(float score) {
  uint32_t bits;
  std::memcpy(&bits, &score, sizeof(bits));
  return bits ^ (-(bits >> 31) | uint32_t{1} << 31);
}

// Numbers between which the n_kept-th highest of n most likely lies, both included.
std::pair<uint32_t, uint32_t> find_bracket(const float* scores, size_t n, size_t n_kept) {
  uint32_t samples[kSamples], low = 0, high = UINT32_MAX;
  for (size_t i = 0; i < kSamples; ++i) samples[i] = order_of(scores[i * n / kSamples]);
  const float part = static_cast<float>(n_kept) / static_cast<float>(n),
              deviation = std::sqrt(kSamples * part * (1.0f - part));
  const auto rank = static_cast<size_t>(kSamples * part), margin = static_cast<size_t>(3.0f * deviation) + 1;
  const auto highest = [&](size_t rank) {
    std::nth_element(samples, samples + rank, samples + kSamples, std::greater<>());
    return samples[rank];
  };
  if (rank + margin < kSamples) low = highest(rank + margin);
  if (rank >= margin) high = highest(rank - margin);
  return {low, high};
}

}  // namespace

// Loops over all scores have no branches, since nothing predicts which are kept. Those near the lowest of
// them are few, and counted in buckets of an ever smaller range: digits of all of them take twice as long.
BestScores::BestScores(const float* scores, size_t n, size_t n_kept, uint32_t* scratch)
    : kept_(scratch + n), n_kept_(std::min(n, n_kept)) {
  uint32_t *keys = scratch, *rest = scratch + n;
  if (n_kept_ == n) std::iota(rest, rest + n, uint32_t{0});
  if (n_kept_ == n || n_kept_ == 0) return;
  auto [low, high] =
      n < kLeastToSample ? std::pair{uint32_t{0}, UINT32_MAX} : find_bracket(scores, n, n_kept);
  size_t n_above = 0, n_rest = 0;
  for (size_t i = 0; i < n; ++i) {
    const uint32_t key = order_of(scores[i]);
    keys[i] = rest[n_rest] = key;
    n_above += key > high;
    n_rest += key - low <= high - low;
  }
  if (n_above >= n_kept || n_above + n_rest < n_kept) {
    std::copy_n(keys, n, rest);
    low = 0, high = UINT32_MAX;
    n_above = 0, n_rest = n;
  }
  size_t n_wanted = n_kept - n_above;  // of the rest
  while (low < high) {
    constexpr uint32_t kBuckets = 256;
    uint32_t shift = 0, counts[kBuckets] = {};
    while ((high - low) >> shift >= kBuckets) ++shift;
    for (size_t i = 0; i < n_rest; ++i) ++counts[(rest[i] - low) >> shift];
    uint32_t found = kBuckets - 1;
    while (counts[found] < n_wanted) n_wanted -= counts[found--];
    low += found << shift;
    high = low + std::min(high - low, (uint32_t{1} << shift) - 1);
    size_t n_found = 0;
    for (size_t i = 0; i < n_rest; ++i) {
      const uint32_t key = rest[i];
      rest[n_found] = key;
      n_found += key - low <= high - low;
    }
    n_rest = n_found;
  }
  uint32_t* const kept = rest;
  size_t n_found = 0;
  for (size_t i = 0; i < n; ++i) {
    kept[n_found] = static_cast<uint32_t>(i);
    n_found += keys[i] >= low;
  }
  if (n_found == n_kept) return;
  uint32_t* next = kept;
  for (size_t i = 0; i < n_found; ++i) {  // of those like the lowest the first
    const bool is_lowest = keys[kept[i]] == low;
    if (is_lowest && n_wanted == 0) continue;
    n_wanted -= is_lowest;
    *next++ = kept[i];
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
  constexpr size_t kPages = PageBounds::kBlockPages;
  for (size_t block = first; block < end; ++block, out += kPages) {
    float best[kPages];  // nothing else is written: gcc 12 takes vectors
    std::copy_n(out, kPages, best);
    for (size_t g = 1; g < head.group_size; ++g) {
      const float* others = out + g * stride;
      for (size_t i = 0; i < kPages; ++i) best[i] = best[i] < others[i] ? others[i] : best[i];
    }
    std::copy_n(best, kPages, out);
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
