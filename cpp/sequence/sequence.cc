#include "sequence/sequence.h"

#include <algorithm>
#include <cstring>
#include <iterator>

#include "base/check.h"

namespace edgeh2o {
namespace {

// Every so-manieth query is sampled: neighbours ask for much the same.
constexpr size_t kSampleStep = 2;
// Of the queries that a policy samples, what a call gets that does not end the prompt: the last one may be
// short.
constexpr size_t kLaterSamples = 4;

AttentionShape attention_shape(const LayerKeeps& layer, const SequenceShape& shape) {
  const AttentionShape result{layer.heads,
                              shape.max_context,
                              shape.batch_size,
                              shape.chunk_size,
                              layer.heads.rounded_as(shape.precision),
                              shape.evicts};
  result.check();
  return result;
}

bool are_equal(const AttentionHeads& a, const AttentionHeads& b) {
  return a.n_heads == b.n_heads && a.n_kv_heads == b.n_kv_heads && a.key_dim == b.key_dim &&
         a.value_dim == b.value_dim && a.values_are_keys == b.values_are_keys && a.scale == b.scale &&
         a.soft_cap == b.soft_cap && a.has_large_keys == b.has_large_keys && a.index == b.index &&
         a.is_causal == b.is_causal && a.max_alibi_bias == b.max_alibi_bias;
}

bool are_causal(const std::vector<LayerKeeps>& layers) {
  return std::all_of(layers.begin(), layers.end(),
                     [](const LayerKeeps& keeps) { return keeps.heads.is_causal; });
}

// Of reads that the policy has no part in, which need no memory sets of single query heads.
AttentionPlan dense_plan(const AttentionPlan& plan) {
  AttentionShape shape = plan.shape;
  shape.splits_groups = false;
  PolicyNeeds needs;
  needs.reads_all = true;
  return {plan.table, shape, needs};
}

// Those of plans where the policy splits groups.
std::vector<AttentionPlan> make_dense_plans(const std::vector<AttentionPlan>& plans) {
  std::vector<AttentionPlan> result;
  if (!plans.empty() && plans[0].shape.splits_groups)
    std::transform(plans.begin(), plans.end(), std::back_inserter(result), dense_plan);
  return result;
}

PolicyNeeds needs_of(const std::vector<LayerKeeps>& layers, const SparsePolicy& policy,
                     const SequenceShape& shape) {
  return policy.needs(Sequence::policy_shape(layers, shape, policy.splits_groups()));
}

// Checks all shapes; gives the plans, none where no layer attends, and the plan of every layer.
std::vector<AttentionPlan> make_plans(const KernelTable& table, const std::vector<LayerKeeps>& layers,
                                      const SparsePolicy& policy, const SequenceShape& shape,
                                      std::vector<size_t>* plan_of_layer = nullptr) {
  EH2O_CHECK(!layers.empty(), "n_layers must be at least 1");
  for (size_t i = 0; i < layers.size(); ++i) {
    const AttentionHeads& heads = layers[i].heads;
    if (heads.is_none()) continue;
    EH2O_CHECK(!heads.are_lent, "what reads keys and values of another model has no sequence of its own");
    attention_shape(layers[i], shape);
    EH2O_CHECK(heads.kv_distance <= i, "layer ", i, " reads keys and values of ", heads.kv_distance,
               " layers before it");
    const AttentionHeads& source = layers[i - heads.kv_distance].heads;
    EH2O_CHECK(source.has_own_kv() && source.n_kv_heads == heads.n_kv_heads &&
                   source.key_dim == heads.key_dim && source.value_dim == heads.value_dim &&
                   source.values_are_keys == heads.values_are_keys,
               "layer ", i, " reads keys and values of heads of another shape");
  }
  const PolicyNeeds needs = needs_of(layers, policy, shape);
  const bool is_indexed = std::any_of(layers.begin(), layers.end(),
                                      [](const LayerKeeps& keeps) { return !keeps.heads.index.is_none(); });
  EH2O_CHECK(!is_indexed || (needs.reads_all && !needs.ends_prompts && !policy.chooses_in_decode()),
             "what this model reads its own indexer chooses, not another rule (", policy.describe(),
             "); use --attention dense");
  EH2O_CHECK(are_causal(layers) || (needs.reads_all && !needs.ends_prompts && !policy.chooses_in_decode()),
             "attention that is not causal reads everything, not by a rule (", policy.describe(),
             "); use --attention dense");
  const bool has_distances = std::any_of(layers.begin(), layers.end(), [](const LayerKeeps& keeps) {
    return keeps.heads.max_alibi_bias > 0.0f;
  });
  EH2O_CHECK(!has_distances || (needs.reads_all && !needs.ends_prompts && !policy.chooses_in_decode()),
             "attention with a bias by distance (ALiBi) reads everything, not by a rule (", policy.describe(),
             "); use --attention dense");
  std::vector<AttentionPlan> plans;
  for (const LayerKeeps& layer : layers) {
    const AttentionHeads& heads = layer.heads;
    AttentionShape attention;
    if (!heads.is_none()) attention = attention_shape(layer, shape);
    const auto found = std::find_if(plans.begin(), plans.end(), [&](const AttentionPlan& plan) {
      return are_equal(plan.shape.heads, heads);
    });
    if (plan_of_layer) plan_of_layer->push_back(static_cast<size_t>(found - plans.begin()));
    if (found == plans.end() && !heads.is_none()) {
      attention.splits_groups = policy.splits_groups();
      attention.sums_weights |= needs.n_sampled_queries > 0;
      plans.emplace_back(table, attention, needs);
    }
  }
  return plans;
}

// What keys of a layer receive of sampled queries.
size_t sampled_numbers(const PolicyNeeds& needs, const PolicyShape& shape) {
  return needs.n_sampled_queries > 0 ? shape.max_layer_slots * shape.max_context : 0;
}

size_t most_scratch(const std::vector<AttentionPlan>& plans, size_t n_threads) {
  size_t most = 0;
  for (const AttentionPlan& plan : plans) {
    most = std::max(most, plan.scratch_bytes(n_threads));
    if (plan.shape.splits_groups) most = std::max(most, dense_plan(plan).scratch_bytes(n_threads));
  }
  return most;
}

}  // namespace

PolicyShape Sequence::policy_shape(const std::vector<LayerKeeps>& layers, const SequenceShape& shape,
                                   bool splits_groups) {
  PolicyShape result;
  result.max_context = shape.max_context;
  result.chunk_size = std::min({shape.chunk_size, shape.batch_size, shape.max_context});
  for (const LayerKeeps& layer : layers) {
    const AttentionHeads& heads = layer.heads;
    const size_t n_slots = splits_groups ? heads.n_heads : heads.n_kv_heads;
    const size_t group_size = heads.is_none() ? 0 : heads.n_heads / n_slots;
    const size_t n_sharing = heads.is_none() ? 1 : n_slots / heads.n_kv_heads;
    result.add_layer(n_slots, {0, 0, group_size, heads.key_dim, heads.value_dim, n_sharing});
  }
  return result;
}

Sequence::Sequence(const KernelTable& table, const std::vector<LayerKeeps>& layers,
                   std::shared_ptr<SparsePolicy> policy, const SequenceShape& shape)
    : shape_(shape), policy_(std::move(policy)), table_(table) {
  EH2O_CHECK(shape.guard.limit >= 0.0, "the limit of the attention's error is ", shape.guard.limit,
             "; it must be at least 0");
  std::vector<size_t> plan_of_layer;
  plans_ = make_plans(table, layers, *policy_, shape, &plan_of_layer);
  needs_ = needs_of(layers, *policy_, shape);
  dense_plans_ = make_dense_plans(plans_);
  const PolicyShape told = policy_shape(layers, shape, policy_->splits_groups());
  kv_shape_ = told.of_kv_heads();
  const auto make_layers = [&] {
    layers_.clear();
    const size_t first_place = arena_.position();
    for (size_t i = 0; i < layers.size(); ++i) {
      const AttentionHeads& heads = layers[i].heads;
      // Rows that are read by the call that writes them, and by no other, are gone with their layer.
      if (!heads.is_causal) arena_.go_to(first_place);
      std::unique_ptr<AttentionState> rows;
      std::unique_ptr<RecurrentState> recurrent;
      if (!layers[i].recurrence.is_none()) {
        recurrent = std::make_unique<RecurrentState>(layers[i].recurrence, most_decoded(shape), arena_);
      }
      if (!heads.is_none() && heads.has_own_kv()) {
        rows = std::make_unique<AttentionState>(table, heads, shape.cache_types, shape.max_context, arena_);
      }
      AttentionState* attention =
          heads.is_none() || rows ? rows.get() : layers_[i - heads.kv_distance].attention;
      layers_.push_back({attention,
                         std::move(rows),
                         std::move(recurrent),
                         plan_of_layer[i],
                         PromptMemory(*policy_, ends_prompts() && !layers[i].is_windowed, kv_shape_, i,
                                      shape.cache_types, heads.values_are_keys, prompt_arena_),
                         std::vector<SetReads>(told.n_slots(i), SetReads::kByPolicy),
                         {},
                         {},
                         layers[i].chunk});
    }
  };
  make_layers();
  arena_.allocate();
  prompt_arena_.allocate();
  make_layers();
  for (const LayerKeeps& layer : layers) {
    is_recurrent_ |= !layer.recurrence.is_none();
  }
  n_all_sets_ = told.n_slots();
  sampled_.reserve(sampled_numbers(needs_, kv_shape_));
  errors_.reserve(told.max_layer_slots);
  again_.reserve(told.max_layer_slots);
  tokens_.reserve(shape.max_context);
  ahead_.reserve(shape.batch_size);
  policy_->begin_session(told);
}

SequenceBytes Sequence::estimate_bytes(const KernelTable& table, const std::vector<LayerKeeps>& layers,
                                       const SparsePolicy& policy, const SequenceShape& shape,
                                       size_t n_threads) {
  const std::vector<AttentionPlan> plans = make_plans(table, layers, policy, shape);
  const PolicyNeeds needs = needs_of(layers, policy, shape);
  const PolicyShape told = policy_shape(layers, shape, policy.splits_groups()), kv_shape = told.of_kv_heads();
  Arena rows, recurrent;
  size_t received = 0, ahead = 0;
  for (size_t i = 0; i < layers.size(); ++i) {
    const AttentionHeads& heads = layers[i].heads;
    if (!layers[i].recurrence.is_none()) {
      RecurrentState(layers[i].recurrence, 0, recurrent);
      ahead += RecurrentState::ahead_bytes(layers[i].recurrence, most_decoded(shape));
    }
    if (!heads.is_none() && heads.has_own_kv()) {
      if (!heads.is_causal) rows.go_to(0);
      AttentionState(table, heads, shape.cache_types, shape.max_context, rows);
      if (shape.evicts) received += ReceivedAttention::bytes(heads.n_kv_heads, shape.max_context);
    }
    PromptMemory(policy, needs.ends_prompts && !layers[i].is_windowed, kv_shape, i, shape.cache_types,
                 heads.values_are_keys, rows);
  }
  received += sampled_numbers(needs, kv_shape) * sizeof(float);
  return {rows.used(), recurrent.used(), ahead, most_scratch(plans, n_threads),
          policy.state_bytes(told) + received};
}

void Sequence::change_plans(const std::function<void(AttentionShape&)>& change) {
  std::vector<AttentionPlan> plans;
  for (const AttentionPlan& plan : plans_) {
    AttentionShape shape = plan.shape;
    change(shape);
    plans.emplace_back(plan.table, shape, plan.needs);
  }
  std::vector<AttentionPlan> dense_plans = make_dense_plans(plans);
  plans_.swap(plans);
  dense_plans_.swap(dense_plans);
}

void Sequence::read_rest(AttentionPrecision precision, bool reads_all) {
  check_whole();
  change_plans([&](AttentionShape& shape) { shape.precision = shape.heads.rounded_as(precision); });
  shape_.precision = precision;
  if (!reads_all) return;
  shape_.guard.n_rows = 0;
  if (needs_.ends_by_scores) return;  // the policy has to see the prompt
  for (Layer& layer : layers_) std::fill(layer.reads.begin(), layer.reads.end(), SetReads::kAll);
}

size_t Sequence::scratch_bytes(size_t n_threads) const { return most_scratch(plans_, n_threads); }

size_t Sequence::position() const {
  if (is_broken_) return call_begin_;
  size_t least = std::numeric_limits<size_t>::max(), most = 0;
  for_each_state([&](const LayerState& state) {
    least = std::min(least, state.n_tokens());
    most = std::max(most, state.n_tokens());
  });
  EH2O_CHECK(least == most, "the layers hold different numbers of tokens");
  return most;
}

size_t Sequence::n_kv_heads_before(size_t layer) const {
  size_t n_heads = 0;
  for (size_t i = 0; i < layer; ++i) n_heads += attends(i) ? this->layer(i).n_kv_heads() : 0;
  return n_heads;
}

uint64_t Sequence::pairs_computed(size_t n_layers) const {
  return n_pairs_ / std::max<size_t>(1, n_kv_heads_before(n_layers));
}

uint64_t Sequence::pairs_dense(size_t n_layers) const {
  size_t n_attending = 0;
  for (size_t i = 0; i < n_layers; ++i) n_attending += attends(i);
  return n_pairs_dense_ / std::max<size_t>(1, n_attending);
}

void Sequence::begin_call() {
  check_whole();
  call_begin_ = position();
  ahead_.clear();
  settle();
  n_repeats_ = 0;
  is_broken_ = true;
}

void Sequence::settle() const {
  for (const Layer& layer : layers_) {
    if (layer.recurrent) layer.recurrent->settle(table_);
  }
}

void Sequence::check_whole() const {
  EH2O_CHECK(!is_broken_, "the last call was interrupted: reset() the session first");
}

void Sequence::end_prefill(size_t position) {
  prefill_end_ = position;
  for (Layer& layer : layers_) layer.prompt.forget();
}

void Sequence::append_ahead(Span<const int32_t> tokens) {
  const size_t n_others = tokens.size - 1;
  for_each_state([&](LayerState& state) { state.rewind(state.n_tokens() - n_others); });
  append_tokens({tokens.data, 1});
  ahead_.assign(tokens.begin() + 1, tokens.end());
}

void Sequence::accept(size_t n) {
  check_whole();
  EH2O_CHECK(n <= ahead_.size(), "cannot accept ", n, " tokens: the last call left ", ahead_.size());
  for_each_state([&](LayerState& state) { state.advance(n); });
  append_tokens({ahead_.data(), n});
  ahead_.erase(ahead_.begin(), ahead_.begin() + static_cast<ptrdiff_t>(n));
}

void Sequence::attend(size_t layer, MatView<const float> q, size_t window, PromptEnd end, uint8_t* scratch,
                      size_t n_threads, MatView<float> out) {
  const LayerKv& kv = this->layer(layer).rows();
  const size_t first = this->layer(layer).n_tokens() - q.rows;
  if (const size_t chunk = layers_[layer].chunk) {
    uint64_t n_dense = 0;
    for_each_chunk(first, q.rows, chunk, [&](size_t begin, size_t n, size_t start) {
      n_dense += causal_pairs(first + begin - start, n, 0);
    });
    return count_pairs(attend_chunks(layer, q, end, scratch, n_threads, out), n_dense);
  }
  sample(layer, q, window, end, scratch, n_threads);
  // A window over everything: the policy is neither asked nor told, and query heads share what they read.
  const size_t seen = window == 0 && has_dense_sets(layer) ? first + q.rows : window;
  const uint64_t n_pairs =
      is_guarded(layer, window)
          ? attend_guarded(layer, q, end, scratch, n_threads, out)
          : attention(layer, scratch, n_threads, seen > 0).run(q, kv, first, seen, end, out);
  const bool is_causal = plan(layer).shape.heads.is_causal;
  count_pairs(n_pairs, is_causal ? causal_pairs(first, q.rows, window) : symmetric_pairs(q.rows, window));
}

uint64_t Sequence::attend_chunks(size_t layer, MatView<const float> q, PromptEnd end, uint8_t* scratch,
                                 size_t n_threads, MatView<float> out) {
  const LayerKv& kv = this->layer(layer).rows();
  const size_t first = this->layer(layer).n_tokens() - q.rows, chunk = layers_[layer].chunk;
  uint64_t n_pairs = 0;
  for_each_chunk(first, q.rows, chunk, [&](size_t begin, size_t n, size_t start) {
    n_pairs += attention(layer, scratch, n_threads, true)
                   .run(q.rows_from(begin, n), kv.from(start), first + begin - start, chunk, end,
                        out.rows_from(begin, n));
  });
  return n_pairs;
}

void Sequence::attend_aside(size_t layer, MatView<const float> q, size_t window, PromptEnd end,
                            uint8_t* scratch, size_t n_threads, MatView<float> out) {
  if (layers_[layer].chunk > 0) {
    attend_chunks(layer, q, end, scratch, n_threads, out);
    return;
  }
  const size_t first = this->layer(layer).n_tokens() - q.rows;
  const size_t seen = window == 0 ? first + q.rows : window;
  attention(layer, scratch, n_threads, true).run(q, this->layer(layer).rows(), first, seen, end, out);
}

void Sequence::sample(size_t layer, MatView<const float> q, size_t window, PromptEnd end, uint8_t* scratch,
                      size_t n_threads) {
  if (window > 0 || plan(layer).needs.n_sampled_queries == 0) return;
  const size_t n_heads = plan(layer).shape.heads.n_kv_heads, n_tokens = this->layer(layer).n_tokens();
  if (n_tokens < plan(layer).needs.sampled_from) return;
  const size_t most = plan(layer).needs.n_sampled_queries / (end == PromptEnd::kLater ? kLaterSamples : 1),
               n = std::min(most, ceil_div(q.rows, kSampleStep));
  const auto slot = [&](size_t head) { return kv_shape_.slot(layer, head); };
  const auto is_sampled = [&](size_t head) { return policy_->is_sampled(slot(head)); };
  size_t n_sampled = 0;
  for (size_t head = 0; head < n_heads; ++head) n_sampled += is_sampled(head);
  if (n_sampled == 0) return;
  sampled_.assign(n_heads * n_tokens, 0.0f);
  const MatView<const float> sampled{q.row(q.rows - 1 - (n - 1) * kSampleStep), n, q.cols,
                                     kSampleStep * q.stride};
  add_weights(layer, sampled, kSampleStep, {sampled_.data(), n_tokens}, scratch, n_threads, is_sampled);
  for (size_t head = 0; head < n_heads; ++head) {
    if (is_sampled(head))
      policy_->observe_sample(slot(head), n, {sampled_.data() + head * n_tokens, n_tokens});
  }
}

}  // namespace edgeh2o
