#include "ops/prompt_memory.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/parallel.h"

namespace edgeh2o {
namespace {

// A row of f16 as blocks of q8_0.
void round_row(const KernelTable& table, const uint8_t* row, size_t head_dim, uint8_t* out) {
  float values[kKvBlock];
  for (size_t dim = 0; dim < head_dim; dim += kKvBlock, row += 2 * kKvBlock, out += kKvBlockBytes) {
    table.load_f32_f16(values, reinterpret_cast<const uint16_t*>(row), kKvBlock);
    table.store_kv_row_f32(CacheType::kQ8_0, out, values, kKvBlock);
  }
}

// Copies listed rows, or rounds them, and converts synthetic ones behind them.
void gather_rows(const KernelTable& table, const KvRows& cached, const MemorySet& set, const float* synthetic,
                 const KvRows& out) {
  const size_t row_bytes = kv_row_bytes(cached.type, cached.head_dim);
  for (size_t i = 0; i < set.n_listed; ++i) {
    const uint8_t* row = cached.row(static_cast<size_t>(set.positions[i]));
    if (out.type == cached.type) {
      std::memcpy(out.row(i), row, row_bytes);
    } else {
      round_row(table, row, cached.head_dim, out.row(i));
    }
  }
  for (size_t i = 0; i < set.synthetic.count; ++i) {
    table.store_kv_row_f32(out.type, out.row(set.n_listed + i), synthetic + i * out.head_dim, out.head_dim);
  }
}

}  // namespace

CacheType PromptMemory::row_type(CacheType cached, size_t head_dim) {
  return cached == CacheType::kF16 && head_dim % kKvBlock == 0 ? CacheType::kQ8_0 : cached;
}

PromptMemory::PromptMemory(const SparsePolicy& policy, bool is_used, const PolicyShape& kv_shape,
                           size_t layer, CacheTypes types, bool values_are_keys, Arena& arena)
    : first_slot_(kv_shape.first_slots[layer]),
      n_kv_heads_(kv_shape.n_slots(layer)),
      values_are_keys_(values_are_keys),
      is_used_(is_used),
      reads_all_(kv_shape.n_slots(layer)) {
  if (!is_used_) return;
  const auto is_rounded = [&](const SlotShape& slot) {
    return row_type(types.k, slot.key_dim) != types.k && row_type(types.v, slot.value_dim) != types.v;
  };
  for (size_t head = 0; head < n_kv_heads_; ++head) {
    const SlotShape& slot = kv_shape.slots[first_slot_ + head];
    Rows rows = take_rows(types, slot, policy.prompt_rows(kv_shape, first_slot_ + head), arena);
    rows.biases = arena.take<float>(rows.capacity);
    rows.positions = arena.take<int32_t>(rows.capacity);
    rows_.push_back(rows);
    const PromptLengths rounded = policy.rounded_prompts(first_slot_ + head);
    const size_t n_copied = std::min(kv_shape.max_context, rounded.most);
    copies_.push_back(
        take_rows(types, slot, is_rounded(slot) && rounded.hold(n_copied) ? n_copied : 0, arena));
  }
}

PromptMemory::Rows PromptMemory::take_rows(CacheTypes types, const SlotShape& slot, size_t n_rows,
                                           Arena& arena) const {
  const auto take = [&](CacheType cached, size_t dim) {
    const CacheType type = row_type(cached, dim);
    return KvRows{type, arena.take<uint8_t>(n_rows * kv_row_bytes(type, dim)), dim};
  };
  Rows rows;
  rows.capacity = n_rows;
  rows.k = take(types.k, slot.key_dim);
  rows.v = values_are_keys_ ? rows.k : take(types.v, slot.value_dim);
  return rows;
}

void PromptMemory::choose(SparsePolicy& policy, const KernelTable& table, const LayerKv& kv,
                          size_t n_tokens) {
  if (is_current_ || !is_used_ || n_tokens == 0) return;
  const PageKernels pages{table.store_kv_row_f32, table.score_blocks_f32};
  parallel_for(n_kv_heads_, [&](size_t head, size_t) {
    rows_[head].is_chosen = false;
    if (reads_all_[head] && rows_[head].capacity > 0) return;
    SelectionInput input{{n_tokens, n_tokens},  {},      kv.k(head), kv.v(head),
                         table.add_kv_rows_f32, nullptr, &pages};
    input.add_kv_squares = table.add_kv_squares_f32;
    const MemorySet set = policy.end_prompt(first_slot_ + head, input);
    EH2O_DASSERT(set.is_valid(n_tokens));
    if (set.positions) gather(table, kv, head, set);
  });
  copy_prompt(policy, table, kv, n_tokens);
  policy.end_layer();
  n_tokens_ = n_tokens;
  is_current_ = true;
}

// The rows behind those that a copy has already, of an earlier turn of the conversation.
void PromptMemory::copy_prompt(const SparsePolicy& policy, const KernelTable& table, const LayerKv& kv,
                               size_t n_tokens) {
  const size_t begin = std::min(n_copied_, n_tokens);
  n_copied_ = n_tokens;
  for (size_t head = 0; head < n_kv_heads_; ++head) {
    Rows& copy = copies_[head];
    if (copy.capacity == 0) continue;
    copy.is_chosen = policy.rounded_prompts(first_slot_ + head).hold(n_tokens);
    if (!copy.is_chosen) {
      n_copied_ = 0;
      continue;
    }
    EH2O_DASSERT(n_tokens <= copy.capacity);
    copy.n_rows = n_tokens;
    const KvRows k = kv.k(head), v = kv.v(head);
    parallel_ranges(n_tokens - begin, [&](size_t first, size_t end, size_t) {
      for (size_t i = begin + first; i < begin + end; ++i) {
        round_row(table, k.row(i), k.head_dim, copy.k.row(i));
        if (!values_are_keys_) round_row(table, v.row(i), v.head_dim, copy.v.row(i));
      }
    });
  }
}

void PromptMemory::gather(const KernelTable& table, const LayerKv& kv, size_t kv_head, const MemorySet& set) {
  Rows& rows = rows_[kv_head];
  EH2O_DASSERT(set.n_rows() <= rows.capacity);
  gather_rows(table, kv.k(kv_head), set, set.synthetic.k, rows.k);
  // Means of rows that are key and value are, too.
  if (!values_are_keys_) gather_rows(table, kv.v(kv_head), set, set.synthetic.v, rows.v);
  std::fill_n(rows.biases, set.n_listed, 0.0f);
  std::copy_n(set.synthetic.biases, set.synthetic.count, rows.biases + set.n_listed);
  std::copy_n(set.positions, set.n_listed, rows.positions);
  rows.n_rows = set.n_rows();
  rows.n_listed = set.n_listed;
  rows.is_chosen = true;
}

}  // namespace edgeh2o
