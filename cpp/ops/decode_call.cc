#include "ops/decode_call.h"

#include <algorithm>

#include "base/check.h"
#include "base/parallel.h"
#include "ops/decode_attention.h"

namespace edgeh2o {
namespace {

constexpr size_t kPartsPerThread = 2;

}  // namespace

void DecodeCall::run(MatView<const float> q, const LayerKv& kv, size_t position, size_t window,
                     MatView<float> out) const {
  EH2O_CHECK(q.rows > 0 && q.rows <= kMaxDecodeTokens, "a decode call takes 1 to ", kMaxDecodeTokens,
             " tokens, got ", q.rows);
  EH2O_CHECK(position + q.rows <= plan.shape.max_context, "positions ", position, " to ", position + q.rows,
             " exceed the context of ", plan.shape.max_context);
  DecodeAttention attention(plan, scratch, n_threads);
  const bool has_policy = policy != nullptr && window == 0,
             asks_policy = has_policy && policy->chooses_in_decode();
  if (has_policy) prompt.choose(*policy, plan.table, kv, n_prompt);
  // Listed positions last until the next choice; tokens that read ranges wait for the others.
  for (size_t token = 0, first = 0; token < q.rows; ++token) {
    const size_t own = position + token;
    const auto set_memory = [&](size_t kv_head) {
      const PromptMemory::Rows* rows = has_policy ? prompt.rows(kv_head) : nullptr;
      if (rows) {
        if (reads) note_read(kv_head, rows, MemorySet::all_of({prompt.n_tokens(), own}), own);
        attention.set_memory(token - first, kv_head, *rows, prompt.n_tokens(), own);
        return false;
      }
      const MemorySet memory = asks_policy ? policy->select(Phase::kDecode, first_slot + kv_head,
                                                            input(q.row(token), kv, own, kv_head))
                                           : MemorySet::all_seen(own, window);
      EH2O_DASSERT(memory.is_valid(own) && (memory.positions || memory.synthetic.count == 0));
      if (reads) note_read(kv_head, nullptr, memory, own);
      const PromptMemory::Rows* copy = has_policy && sums.data == nullptr ? prompt.copy(kv_head) : nullptr;
      attention.set_memory(token - first, kv_head, memory, own, kv, copy);
      return memory.positions != nullptr;
    };
    const size_t n_kv_heads = plan.shape.heads.n_kv_heads;
    bool is_listed = asks_policy && score(q.row(token), kv, own);
    if (is_listed) {
      parallel_for(n_kv_heads, [&](size_t kv_head, size_t) { set_memory(kv_head); });
    } else {
      for (size_t kv_head = 0; kv_head < n_kv_heads; ++kv_head) is_listed |= set_memory(kv_head);
    }
    if (asks_policy) policy->end_layer();
    for (size_t head = 0; n_bytes && asks_policy && head < n_kv_heads; ++head) {
      *n_bytes += policy->choice_bytes(first_slot + head);
    }
    if (is_listed || token + 1 == q.rows) {
      const size_t n_tokens = token + 1 - first;
      if (n_bytes) *n_bytes += attention.bytes_read(n_tokens, kv);
      attention.run(q.rows_from(first, n_tokens), kv, out.rows_from(first, n_tokens),
                    window == 0 ? sums : KeySums{});
      first = token + 1;
    }
  }
}

void DecodeCall::note_read(size_t kv_head, const PromptMemory::Rows* rows, const MemorySet& memory,
                           size_t position) const {
  std::vector<int32_t>& out = reads[kv_head];
  out.clear();
  if (rows) out.assign(rows->positions, rows->positions + rows->n_listed);
  for (size_t i = 0; i < memory.n_positions(); ++i) {
    out.push_back(memory.positions ? memory.positions[i] : static_cast<int32_t>(memory.range.begin + i));
  }
  out.push_back(static_cast<int32_t>(position));
}

// Whether the policy scores what it chooses from; in parts, because few heads of a layer may choose at all.
bool DecodeCall::score(const float* q, const LayerKv& kv, size_t position) const {
  const size_t n_kv_heads = plan.shape.heads.n_kv_heads, n_parts = kPartsPerThread * n_threads;
  bool is_wanted = false;
  for (size_t head = 0; head < n_kv_heads; ++head) {
    is_wanted |= policy->prepare_decode(first_slot + head, input(q, kv, position, head));
  }
  if (!is_wanted) return false;
  parallel_for(n_kv_heads * n_parts, [&](size_t task, size_t) {
    const size_t head = task / n_parts;
    policy->score_decode(first_slot + head, input(q, kv, position, head), task % n_parts, n_parts);
  });
  return true;
}

SelectionInput DecodeCall::input(const float* q, const LayerKv& kv, size_t position, size_t kv_head) const {
  const size_t width = plan.shape.heads.group_size() * plan.shape.heads.key_dim;
  return {{position, position + 1},
          {q + kv_head * width, 1, width, width},
          kv.k(kv_head),
          kv.v(kv_head),
          plan.table.add_kv_rows_f32,
          nullptr,
          &pages};
}

}  // namespace edgeh2o
