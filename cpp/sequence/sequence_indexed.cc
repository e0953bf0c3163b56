// The attention of layers with a lightning indexer.
#include <algorithm>

#include "sequence/sequence.h"

namespace edgeh2o {

size_t Sequence::most_chosen() const {
  size_t most = 0;
  for (const AttentionPlan& plan : plans_) most = std::max(most, plan.shape.heads.index.most_read());
  return most;
}

void Sequence::choose(size_t layer, MatView<const float> q, MatView<const float> weights, size_t position,
                      uint8_t* scratch, size_t n_threads, const ChosenPositions& out) const {
  const AttentionPlan& plan = this->plan(layer);
  const AttentionState& state = this->layer(layer);
  IndexChoice(plan.table, plan.shape.heads.index, plan.shape.max_context, scratch, n_threads)
      .run(q, weights, state.has_blocks() ? state.block_rows() : state.index_rows(), position, out);
}

void Sequence::pool_blocks(size_t layer, const BlockKeys& rule) {
  AttentionState& state = this->layer(layer);
  if (!state.has_blocks()) return;
  const size_t first = state.n_blocks();
  pool_keys(table_, rule, state.index_rows(), first, state.n_whole_blocks() - first, state.block_rows());
  state.count_blocks();
}

void Sequence::attend_chosen(size_t layer, MatView<const float> q, const ChosenPositions& chosen,
                             PromptEnd end, uint8_t* scratch, size_t n_threads, MatView<float> out) {
  const size_t first = this->layer(layer).n_tokens() - q.rows;
  const size_t n_free = plan(layer).shape.heads.index.n_free(first, q.rows), n = q.rows - n_free;
  uint64_t n_pairs = 0;
  if (n_free > 0) {
    n_pairs =
        attention(layer, scratch, n_threads)
            .run(q.rows_from(0, n_free), this->layer(layer).rows(), first, 0, end, out.rows_from(0, n_free));
  }
  if (n > 0) {
    read_chosen(layer, q.rows_from(n_free, n), first + n_free, chosen.rows_from(n_free), false, scratch,
                n_threads, out.rows_from(n_free, n));
  }
  for (size_t row = n_free; row < q.rows; ++row) {
    for (size_t head = 0; head < this->layer(layer).n_kv_heads(); ++head) n_pairs += chosen.count(row, head);
  }
  count_pairs(n_pairs, causal_pairs(first, q.rows, 0));
}

void Sequence::read_chosen(size_t layer, MatView<const float> q, size_t position,
                           const ChosenPositions& chosen, bool is_decode, uint8_t* scratch, size_t n_threads,
                           MatView<float> out) {
  const AttentionState& state = this->layer(layer);
  const KvRows& index = state.index_rows();
  const size_t scored_together = plan(layer).shape.heads.index.scored_together();
  DecodeAttention attention(plan(layer), scratch, n_threads);
  for (size_t first = 0; first < q.rows; first += kMaxDecodeTokens) {
    const size_t n = std::min(kMaxDecodeTokens, q.rows - first);
    for (size_t i = 0; i < n; ++i) {
      const size_t row = first + i, own = position + row;
      const bool has_chosen = chosen.count(row, 0) > 0;
      for (size_t head = 0; head < state.n_kv_heads(); ++head) {
        if (has_chosen) {
          attention.set_positions(i, head, chosen.row(row, head), chosen.count(row, head));
        } else {
          attention.set_memory(i, head, MemorySet::all_seen(own, 0), own, state.rows());
        }
      }
      if (is_decode && has_chosen) {
        n_decode_bytes_ += (own + 1) / scored_together * kv_row_bytes(index.type, index.head_dim);
      }
      if (is_decode && !reads_.empty()) note_chosen(layer, chosen, row, own);
    }
    if (is_decode) n_decode_bytes_ += attention.bytes_read(n, state.rows());
    attention.run(q.rows_from(first, n), state.rows(), out.rows_from(first, n));
  }
}

void Sequence::note_chosen(size_t layer, const ChosenPositions& chosen, size_t row, size_t position) {
  const size_t first = policy_->shape().first_slots[layer];
  for (size_t head = 0; head < this->layer(layer).n_kv_heads(); ++head) {
    std::vector<int32_t>& noted = reads_[first + head];
    const size_t count = chosen.count(row, head);
    noted.assign(chosen.row(row, head), chosen.row(row, head) + count);
    for (size_t i = 0; count == 0 && i <= position; ++i) noted.push_back(static_cast<int32_t>(i));
  }
}

}  // namespace edgeh2o
