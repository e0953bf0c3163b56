#include "ops/prompt_memory.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/parallel.h"

namespace edgeh2o {
namespace {

// Copies listed rows, and converts synthetic ones behind them.
void gather_rows(const KernelTable& table, const KvRows& cached, const MemorySet& set, const float* synthetic,
                 const KvRows& out) {
  const size_t row_bytes = kv_row_bytes(cached.type, cached.head_dim);
  for (size_t i = 0; i < set.n_listed; ++i) {
    std::memcpy(out.row(i), cached.row(static_cast<size_t>(set.positions[i])), row_bytes);
  }
  for (size_t i = 0; i < set.synthetic.count; ++i) {
    table.store_kv_row_f32(out.type, out.row(set.n_listed + i), synthetic + i * out.head_dim, out.head_dim);
  }
}

}  // namespace

PromptMemory::PromptMemory(const SparsePolicy& policy, bool is_used, const PolicyShape& kv_shape,
                           size_t layer, CacheTypes types, bool values_are_keys, Arena& arena)
    : first_slot_(kv_shape.first_slots[layer]),
      n_kv_heads_(kv_shape.n_slots(layer)),
      values_are_keys_(values_are_keys),
      is_used_(is_used),
      reads_all_(kv_shape.n_slots(layer)) {
  if (!is_used_) return;
  for (size_t head = 0; head < n_kv_heads_; ++head) {
    const SlotShape& slot = kv_shape.slots[first_slot_ + head];
    Rows rows;
    rows.capacity = policy.prompt_rows(kv_shape, first_slot_ + head);
    rows.k = {types.k, arena.take<uint8_t>(rows.capacity * kv_row_bytes(types.k, slot.key_dim)),
              slot.key_dim};
    rows.v = rows.k;
    if (!values_are_keys) {
      rows.v = {types.v, arena.take<uint8_t>(rows.capacity * kv_row_bytes(types.v, slot.value_dim)),
                slot.value_dim};
    }
    rows.biases = arena.take<float>(rows.capacity);
    rows.positions = arena.take<int32_t>(rows.capacity);
    rows_.push_back(rows);
  }
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
  policy.end_layer();
  n_tokens_ = n_tokens;
  is_current_ = true;
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
