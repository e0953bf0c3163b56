// Going on past a full context: rows go, the others move up.
#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/parallel.h"
#include "sequence/sequence.h"

namespace edgeh2o {
namespace {

// Last queries of a prefill call whose attention is looked at.
constexpr size_t kObservedQueries = 16;

// Calls f(position, rank) for the positions below n that are not dropped, in order.
template <typename F>
void for_each_kept(const int32_t* dropped, size_t n_dropped, size_t n, const F& f) {
  for (size_t position = 0, next = 0, rank = 0; position < n; ++position) {
    if (next < n_dropped && static_cast<size_t>(dropped[next]) == position) {
      ++next;
    } else {
      f(position, rank++);
    }
  }
}

void check_rule(const SparsePolicy& policy, bool ends_prompts, bool is_indexed,
                const CacheTypes& cache_types) {
  EH2O_CHECK(!is_indexed,
             "what this model reads its own indexer chooses, so that nothing says what can go; use "
             "--context-full shift");
  EH2O_CHECK(!ends_prompts && !policy.chooses_in_decode(), "this policy (", policy.describe(),
             ") says what generated tokens read, which an eviction would change; use --context-full shift, "
             "--attention dense, or --decode-attention dense where the attention has it");
  EH2O_CHECK(
      cache_types.k != CacheType::kQ8_0,
      "keys of cache type q8_0 would be rounded anew at every eviction; use --cache-type f16, f16/q8_0 "
      "or --context-full shift");
}

}  // namespace

void Sequence::allow_eviction(bool is_allowed) {
  if (shape_.evicts == is_allowed) return;
  check_whole();
  if (is_allowed) check_rule(*policy_, ends_prompts(), is_indexed(), shape_.cache_types);
  shape_.evicts = is_allowed;
  const bool is_sampling = needs_.n_sampled_queries > 0;
  change_plans([&](AttentionShape& shape) { shape.sums_weights = is_allowed || is_sampling; });
  for (size_t i = 0; i < layers_.size(); ++i) {
    layers_[i].received = nullptr;
    if (!attends(i) || !is_allowed) continue;
    layers_[i].received = has_own_rows(i)
                              ? std::make_shared<ReceivedAttention>(layer(i).n_kv_heads(), shape_.max_context)
                              : layers_[owner_of(i)].received;
  }
}

// Of the rows that the layer reads.
size_t Sequence::owner_of(size_t layer) const {
  size_t i = layer;
  while (!layers_[i].own || layers_[i].attention != layers_[layer].attention) --i;
  return i;
}

void Sequence::check_eviction(const std::vector<LayerKeeps>& layers, const SparsePolicy& policy,
                              const SequenceShape& shape) {
  const bool is_indexed = std::any_of(layers.begin(), layers.end(),
                                      [](const LayerKeeps& keeps) { return !keeps.heads.index.is_none(); });
  const PolicyNeeds needs = policy.needs(policy_shape(layers, shape, policy.splits_groups()));
  check_rule(policy, needs.ends_prompts, is_indexed, shape.cache_types);
}

void Sequence::observe(size_t layer, MatView<const float> q, uint8_t* scratch, size_t n_threads) {
  const size_t n = std::min(kObservedQueries, q.rows);
  const KeySums sums = layers_[layer].received->begin_queries(this->layer(layer).n_tokens(), n);
  add_weights(layer, q.rows_from(q.rows - n, n), 1, sums, scratch, n_threads, [](size_t) { return true; });
}

std::vector<int32_t> Sequence::choose_dropped(size_t layer, size_t n_dropped, std::vector<float>* scores) {
  const size_t n_heads = this->layer(layer).n_kv_heads(), n = this->layer(layer).n_tokens();
  const size_t n_sets = policy_->shape().n_slots(layer) / n_heads;
  std::vector<int32_t> dropped(n_heads * n_dropped);
  std::vector<uint64_t> ranks(n_heads * n);
  scores->resize(n_heads * n);
  parallel_for(n_heads, [&](size_t head, size_t) {
    float* own = scores->data() + head * n;
    layers_[layer].received->read_means(head, n, own);
    policy_->evict(policy_->shape().slot(layer, head * n_sets),
                   {{own, n}, n_dropped, ranks.data() + head * n}, dropped.data() + head * n_dropped);
  });
  policy_->end_layer();
  return dropped;
}

void Sequence::evict(size_t n_dropped, const std::vector<Rotation>& rotations) {
  check_whole();
  const size_t n = position(), n_kept = n - n_dropped;
  EH2O_CHECK(shape_.evicts && n_dropped > 0 && n_dropped < n, "cannot evict ", n_dropped, " of ", n,
             " tokens");
  // All choices come first: a rule in Python may throw.
  std::vector<std::vector<int32_t>> dropped(layers_.size());
  std::vector<std::vector<float>> scores(layers_.size());
  for (size_t i = 0; i < layers_.size(); ++i) {
    if (!has_own_rows(i)) continue;
    if (rotations[i].is_windowed) {
      for (size_t k = 0; k < layer(i).n_kv_heads() * n_dropped; ++k) {
        dropped[i].push_back(static_cast<int32_t>(k % n_dropped));
      }
    } else {
      dropped[i] = choose_dropped(i, n_dropped, &scores[i]);
    }
  }
  is_broken_ = true;  // until all rows have moved
  call_begin_ = 0;
  for (size_t i = 0; i < layers_.size(); ++i) {
    if (!has_own_rows(i)) continue;
    move_rows(i, dropped[i], n_dropped, rotations[i]);
    layers_[i].received->drop(dropped[i].data(), n_dropped, n);
  }
  for (Layer& layer : layers_) layer.prompt.keep_copied(0);
  for_each_state([&](LayerState& state) { state.renumber(n_kept); });
  is_broken_ = false;
  n_evicted_ += n_dropped;
  ahead_.clear();
  marks_.clear();
  tokens_.reserve(tokens_.size() + shape_.max_context);
  end_prefill(n_kept);
  restart_policy(dropped, scores, n_dropped, n);
}

void Sequence::move_rows(size_t layer, const std::vector<int32_t>& dropped, size_t n_dropped,
                         const Rotation& rotation) {
  const AttentionState& state = this->layer(layer);
  const size_t n = state.n_tokens(), n_pairs = rotation.n_pairs;
  const KernelTable& table = plan(layer).table;
  parallel_for(state.n_kv_heads(), [&](size_t head, size_t) {
    const KvRows k = state.rows().k(head), v = state.rows().v(head);
    const size_t k_bytes = kv_row_bytes(k.type, k.head_dim), v_bytes = kv_row_bytes(v.type, v.head_dim);
    std::vector<float> key(k.head_dim);
    for_each_kept(dropped.data() + head * n_dropped, n_dropped, n, [&](size_t position, size_t rank) {
      if (position == rank) return;
      if (!state.values_are_keys()) std::memcpy(v.row(rank), v.row(position), v_bytes);
      if (n_pairs == 0) {
        std::memcpy(k.row(rank), k.row(position), k_bytes);
        return;
      }
      std::fill(key.begin(), key.end(), 0.0f);
      table.add_kv_rows_f32(k.type, key.data(), k.row(position), nullptr, 1, k.head_dim);
      const size_t back = (position - rank) * n_pairs;
      table.rope_f32(key.data() + rotation.first, rotation.cos + back, rotation.sin + back, n_pairs);
      table.store_kv_row_f32(k.type, k.row(rank), key.data(), k.head_dim);
    });
  });
}

void Sequence::restart_policy(const std::vector<std::vector<int32_t>>& dropped,
                              const std::vector<std::vector<float>>& scores, size_t n_dropped, size_t n) {
  policy_->begin_prompt();
  std::vector<float> kept(n - n_dropped);
  for (size_t i = 0; i < layers_.size(); ++i) {
    if (!attends(i)) continue;
    const size_t source = owner_of(i);
    if (scores[source].empty()) continue;  // of a window
    for (size_t head = 0; head < layer(i).n_kv_heads(); ++head) {
      const float* all = scores[source].data() + head * n;
      // Slots of query heads share what their KV head received.
      const size_t n_sets = policy_->shape().n_slots(i) / layer(i).n_kv_heads();
      for_each_kept(
          dropped[source].data() + head * n_dropped, n_dropped, n,
          [&](size_t position, size_t rank) { kept[rank] = all[position] / static_cast<float>(n_sets); });
      for (size_t set = 0; set < n_sets; ++set) {
        policy_->restart(policy_->shape().slot(i, head * n_sets + set), {kept.data(), kept.size()});
      }
    }
  }
}

}  // namespace edgeh2o
