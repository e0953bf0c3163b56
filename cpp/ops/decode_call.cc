#include "ops/decode_call.h"

#include <algorithm>

#include "base/check.h"
#include "ops/decode_attention.h"

namespace edgeh2o {

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
    bool is_listed = false;
    for (size_t kv_head = 0; kv_head < plan.shape.heads.n_kv_heads; ++kv_head) {
      const size_t own = position + token;
      const PromptMemory::Rows* rows = has_policy ? prompt.rows(kv_head) : nullptr;
      if (rows) {
        attention.set_memory(token - first, kv_head, *rows, prompt.n_tokens(), own);
        continue;
      }
      const MemorySet memory =
          asks_policy ? select(q.row(token), kv, own, kv_head) : MemorySet::all_seen(own, window);
      attention.set_memory(token - first, kv_head, memory, own);
      is_listed |= memory.positions != nullptr;
    }
    if (asks_policy) policy->end_layer();
    if (is_listed || token + 1 == q.rows) {
      const size_t n_tokens = token + 1 - first;
      attention.run(q.rows_from(first, n_tokens), kv, out.rows_from(first, n_tokens));
      first = token + 1;
    }
  }
}

MemorySet DecodeCall::select(const float* q, const LayerKv& kv, size_t position, size_t kv_head) const {
  const size_t width = plan.shape.heads.group_size() * plan.shape.heads.key_dim;
  const MemorySet memory = policy->select(Phase::kDecode, first_slot + kv_head,
                                          {{position, position + 1},
                                           {q + kv_head * width, 1, width, width},
                                           kv.k(kv_head),
                                           kv.v(kv_head),
                                           plan.table.add_kv_rows_f32,
                                           nullptr});
  EH2O_DASSERT(memory.is_valid(position) && memory.synthetic.count == 0);
  return memory;
}

}  // namespace edgeh2o
