// The state of one prompt: its tokens, one state per layer, and the sparse policy. Everything but saved
// states is allocated by the constructor. Scratch is not part of it: see ops/chunked_attention.h,
// model/workspace.h.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <vector>

#include "base/arena.h"
#include "base/mat_view.h"
#include "ops/chunked_attention.h"
#include "ops/decode_attention.h"
#include "ops/decode_call.h"
#include "ops/error_sample.h"
#include "ops/index_choice.h"
#include "sequence/attention_state.h"
#include "sequence/received_attention.h"
#include "sequence/recurrent_state.h"
#include "sparse/sparse_policy.h"

namespace edgeh2o {

// A guard of the sparse attention while it runs. In every layer n_rows queries of a prefill call of
// batch_size tokens, and in proportion of a shorter one, also read everything; what they differ by is the
// layer's error (AttentionError::relative). Where it is more than the layer's limit, the memory sets that err
// most are read again, densely, until it is not; from then on they read the whole prompt. Once half of all
// sets was read again, the layers to come are read densely at once.
struct ErrorGuard {
  // The last third of the layers may err so many times as much: what they are wrong by no later layer looks
  // anything up with (docs/quality.md, "The guard").
  static constexpr double kLate = 16.0;

  size_t n_rows = 0;  // 0: nothing is measured
  double limit = std::numeric_limits<double>::infinity();

  double limit_of(size_t layer, size_t n_layers) const {
    return 3 * layer < 2 * n_layers ? limit : kLate * limit;
  }
};

struct SequenceShape {
  size_t max_context;  // positions that the caches hold
  size_t batch_size;   // most tokens of one prefill call
  size_t chunk_size;
  CacheTypes cache_types;
  AttentionPrecision precision;
  bool all_rows = true;  // the last layer is computed, scored and kept for all tokens of a prompt
  ErrorGuard guard = {};
  bool evicts = false;      // rows may be evicted; see Sequence::allow_eviction
  bool looks_ahead = true;  // decode calls may have several tokens, some of which are taken back
  // What every adapter of the model counts in its tokens (ops/matmul.h), or empty where none does.
  std::vector<float> adapter_scales = {};
  const float* scales() const { return adapter_scales.empty() ? nullptr : adapter_scales.data(); }
};

// How the keys of a layer are rotated back by so many positions: cos and -sin, [most + 1][n_pairs].
struct Rotation {
  const float *cos, *sin;
  size_t first, n_pairs;  // which numbers of a key are rotated
  bool is_windowed;       // the layer's queries see the latest positions only
};

// Bytes by purpose.
struct SequenceBytes {
  size_t kv_cache;         // and what generated tokens read of the prompt, where that is gathered
  size_t recurrent;        // states of the recurrent layers
  size_t ahead;            // and what calls that look ahead take besides
  size_t scratch, policy;  // scratch: of a workspace, for the widest layer
};

class Sequence {
 public:
  // layers: what every layer keeps. Throws std::invalid_argument for sizes that do not fit together and for
  // a policy that serves another sequence, std::bad_alloc when memory runs out.
  Sequence(const KernelTable& table, const std::vector<LayerKeeps>& layers,
           std::shared_ptr<SparsePolicy> policy, const SequenceShape& shape);
  ~Sequence() { policy_->end_session(); }
  Sequence(const Sequence&) = delete;
  Sequence& operator=(const Sequence&) = delete;

  // What a policy is told of sequences of this shape.
  static PolicyShape policy_shape(const std::vector<LayerKeeps>& layers, const SequenceShape& shape,
                                  bool splits_groups);
  static SequenceBytes estimate_bytes(const KernelTable& table, const std::vector<LayerKeeps>& layers,
                                      const SparsePolicy& policy, const SequenceShape& shape,
                                      size_t n_threads);

  const SequenceShape& shape() const { return shape_; }

  // Before the first token: rows then take memory as they are written. Heads lie max_context rows apart, and
  // in huge pages a few tokens take most of the cache.
  void use_small_pages() {
    arena_.use_small_pages();
    prompt_arena_.use_small_pages();
  }

  // What of its rows, its prompt and its policy's state is in memory; also while a call is running.
  size_t resident_bytes() const {
    return arena_.resident_bytes() + prompt_arena_.resident_bytes() + policy_->resident_bytes();
  }

  // Whether the next decode call may copy what it reads of the prompt.
  bool gathers_next() const {
    return std::any_of(layers_.begin(), layers_.end(),
                       [](const Layer& layer) { return layer.prompt.gathers_next(); });
  }

  size_t n_layers() const { return layers_.size(); }
  const SparsePolicy& policy() const { return *policy_; }
  SparsePolicy& policy_of_call() { return *policy_; }  // for attention that runs elsewhere, on a device

  // One layer's attention on so much scratch, and its cache.
  size_t scratch_bytes(size_t n_threads) const;
  const AttentionPlan& plan(size_t layer) const { return plans_[layers_[layer].plan]; }
  ChunkedAttention attention(size_t layer, uint8_t* scratch, size_t n_threads, bool has_window = false) {
    const auto& plans = has_window && !dense_plans_.empty() ? dense_plans_ : plans_;
    return {plans[layers_[layer].plan], *policy_, policy_->shape().first_slots[layer], scratch, n_threads};
  }
  // For generated tokens, which go by the policy, and for the last row of a prompt that reads all it may see.
  DecodeCall decode_call(size_t layer, bool asks_policy, uint8_t* scratch, size_t n_threads) {
    ReceivedAttention* received = asks_policy ? layers_[layer].received.get() : nullptr;
    return {plan(layer),
            asks_policy ? policy_.get() : nullptr,
            layers_[layer].prompt,
            prefill_end_,
            kv_shape_.first_slots[layer],
            scratch,
            n_threads,
            asks_policy ? &n_decode_bytes_ : nullptr,
            received ? received->begin_queries(position() + 1, 1) : KeySums{},
            asks_policy && !reads_.empty() ? &reads_[n_kv_heads_before(layer)] : nullptr};
  }

  // Notes, or no more, what decode calls read, for inspection: by KV head of every layer, the positions that
  // the latest token read. This allocates while they run.
  void note_reads(bool is_wanted) { reads_.resize(is_wanted ? n_kv_heads_before(n_layers()) : 0); }
  const std::vector<std::vector<int32_t>>& reads() const { return reads_; }

  // The attention of a prefill call in one layer, whose rows are in the cache: ChunkedAttention::run under
  // the guard. Its pairs and its error are counted.
  void attend(size_t layer, MatView<const float> q, size_t window, PromptEnd end, uint8_t* scratch,
              size_t n_threads, MatView<float> out);

  // The same rows once more, densely, for those who look at them beside the answer: the policy is neither
  // asked nor told, and no pairs are counted.
  void attend_aside(size_t layer, MatView<const float> q, size_t window, PromptEnd end, uint8_t* scratch,
                    size_t n_threads, MatView<float> out);

  // What the policy samples of a prefill call's rows q, whose keys are in the cache, if it does so; attend
  // sees to it too.
  void sample(size_t layer, MatView<const float> q, size_t window, PromptEnd end, uint8_t* scratch,
              size_t n_threads);

  // Of layers with an indexer, in sequence_indexed.cc. What the queries of the tokens from `position` on,
  // whose keys are in the cache, choose by the layer's own indexer: see IndexChoice.
  void choose(size_t layer, MatView<const float> q, MatView<const float> weights, size_t position,
              uint8_t* scratch, size_t n_threads, const ChosenPositions& out) const;
  // Before it, where the indexer scores blocks: makes the keys of those whose tokens are all in the cache.
  void pool_blocks(size_t layer, const BlockKeys& rule);
  // `attend` of a prefill call to what its rows have chosen: in chunks, as other layers do, as far as they
  // read everything; and the attention of single rows from `position` on, generated ones if it is_decode.
  void attend_chosen(size_t layer, MatView<const float> q, const ChosenPositions& chosen, PromptEnd end,
                     uint8_t* scratch, size_t n_threads, MatView<float> out);
  void read_chosen(size_t layer, MatView<const float> q, size_t position, const ChosenPositions& chosen,
                   bool is_decode, uint8_t* scratch, size_t n_threads, MatView<float> out);
  bool is_indexed() const { return most_chosen() > 0; }
  // Most positions that a query chooses; 0: queries read everything.
  size_t most_chosen() const;

  // The parts of the guard, for attention that runs elsewhere and is read again a layer at a time. Whether it
  // looks at a layer, whose queries may see `window` positions; whether so much of the call was read again
  // that the others are read densely at once; of which rows the error is measured, where n tokens follow the
  // first of a call; what it is: true if the layer must be read again, densely.
  bool is_guarded(size_t layer, size_t window) const {
    return shape_.guard.n_rows > 0 && window == 0 && !plan(layer).needs.reads_all;
  }
  bool reads_densely_at_once() const;
  SampledRows sampled_rows(size_t layer, size_t first, size_t n, PromptEnd end) const;
  bool take_error(size_t layer, AttentionError error);
  void count_dense_read(size_t layer);

  AttentionState& layer(size_t i) { return *layers_[i].attention; }
  const AttentionState& layer(size_t i) const { return *layers_[i].attention; }
  bool attends(size_t i) const { return layers_[i].attention != nullptr; }  // else there is no layer(i)
  // Whether layer(i) is the layer's own, not another's.
  bool has_own_rows(size_t i) const { return layers_[i].own != nullptr; }
  bool has_recurrent(size_t i) const { return layers_[i].recurrent != nullptr; }  // else no recurrent(i)
  RecurrentState& recurrent(size_t i) { return *layers_[i].recurrent; }
  const RecurrentState& recurrent(size_t i) const { return *layers_[i].recurrent; }
  // Whether there are such layers: tokens then cannot be taken back one by one, but for those that were
  // looked at ahead.
  bool is_recurrent() const { return is_recurrent_; }

  // Tokens that all layers have read, before the call that is running or was interrupted. Throws
  // std::invalid_argument while the layers differ.
  size_t position() const;
  size_t prefill_end() const { return prefill_end_; }  // position after the latest prefill call

  // Token ids up to the position, evicted ones included, where the caller hands them over.
  Span<const int32_t> tokens() const { return {tokens_.data(), tokens_.size()}; }
  void append_tokens(Span<const int32_t> tokens) {
    tokens_.insert(tokens_.end(), tokens.begin(), tokens.end());
  }

  // Appends the first of a decode call's tokens, whose rows the layers hold, and sets the others aside: they
  // are not part of the prompt, and every other call forgets them, unless `accept` appends the first n of
  // them. Throws std::invalid_argument for more than there are.
  void append_ahead(Span<const int32_t> tokens);
  void accept(size_t n);
  size_t max_decode_tokens() const { return most_decoded(shape_); }

  // The rest of the prompt is multiplied so, and, if it reads_all, read densely without a guard. The scratch
  // changes. Throws std::invalid_argument for a precision that the table has not got.
  void read_rest(AttentionPrecision precision, bool reads_all);

  // From now on it is noted, or no more, what keys receive of attention, for `evict`; a decode call takes one
  // token, lest guesses that were wrong count. The scratch grows. Throws std::invalid_argument for a policy
  // that acts in decode, and for keys of a type that cannot be rotated again and again.
  void allow_eviction(bool is_allowed);
  // Throws what that would for a sequence of this policy and shape.
  static void check_eviction(const std::vector<LayerKeeps>& layers, const SparsePolicy& policy,
                             const SequenceShape& shape);
  // The last rows q of a prefill call, whose keys are in the cache, in a layer without a window.
  void observe(size_t layer, MatView<const float> q, uint8_t* scratch, size_t n_threads);
  bool observes(size_t layer) const { return layers_[layer].received != nullptr; }
  // Drops n_dropped tokens, of every KV head its own: those that the policy names, or the oldest where there
  // is a window. The others count as tokens 0 to position() - 1 then, there are no marks, and nothing before
  // can be gone back to. rotations: of every layer. Throws std::invalid_argument and what a rule throws,
  // before anything is changed.
  void evict(size_t n_dropped, const std::vector<Rotation>& rotations);
  // Tokens that were dropped since the last reset: tokens() has them still.
  size_t n_evicted() const { return n_evicted_; }

  // A call begins, and has ended well. One that did not leaves the sequence broken: it must go back to a mark
  // or be reset before the next.
  void begin_call();
  void end_call() { is_broken_ = false; }
  void end_prefill(size_t position);
  void check_whole() const;

  // Query-key pairs of a prefill call of one layer: computed, summed over KV heads, and what the model
  // computes without a sparse policy, per head. For attention that runs elsewhere; attend counts them.
  void count_pairs(uint64_t computed, uint64_t dense) { n_pairs_ += computed, n_pairs_dense_ += dense; }

  // Pairs per head of the prompt so far, averaged over those of the first n_layers that attend. These are
  // all that attend for all tokens: all, or all but the last.
  uint64_t pairs_computed(size_t n_layers) const;
  uint64_t pairs_dense(size_t n_layers) const;

  // Bytes of cached rows, and of what policies choose by, that decode calls have read since this was made.
  uint64_t decode_bytes() const { return n_decode_bytes_; }

  // Of the layer, over all calls since the last reset: what the guard measured and let pass.
  const AttentionError& error(size_t layer) const { return layers_[layer].error; }
  // Memory sets of calls that it had read densely.
  size_t n_dense_reads() const { return n_dense_reads_; }

  void reset();

  // Notes the state at the position, so that rewind can go back to it. False if the policy cannot be saved.
  // Where recurrent states are large, marks that lie closest to others are dropped, but for the latest.
  bool mark();
  // The last position up to `position` that rewind can go to: every one from prefill_end on, or, with
  // recurrent layers, the last alone; marks, and 0.
  size_t find_mark(size_t position) const;
  // Forgets the tokens from `position` on. Throws std::invalid_argument for one that find_mark would not
  // name.
  void rewind(size_t position);

  // Where marks lie, ascending.
  std::vector<size_t> marks() const;
  size_t mark_bytes() const;  // that all marks take
  // Forgets the prompt and takes up the first tokens of another sequence, up to one of its marks: tokens,
  // rows, the policy's state, and the marks before. Both go on as one would that had read these tokens. The
  // other may have been interrupted later. Throws std::invalid_argument, and leaves an empty sequence, for a
  // position without a mark and for a sequence of other layers, cache types or adapters, or another policy.
  void copy_from(const Sequence& other, size_t position);

  // The state is all that later calls depend on but the tokens and the cached rows. load_state forgets the
  // prompt and takes bytes from anywhere; it throws std::invalid_argument, and leaves an empty sequence, for
  // a state that a sequence like this could not have saved. The caller then writes the rows.
  std::vector<uint8_t> save_state() const;
  void load_state(Span<const uint8_t> state);

  // The state that is noted at each of `marks`, and the way back: a state with the marks that lie before it.
  std::vector<Span<const uint8_t>> mark_states() const;
  void load_states(Span<const uint8_t> state, const std::vector<Span<const uint8_t>>& marks);

 private:
  struct Layer {
    AttentionState* attention = nullptr;  // its own keys and values, or another layer's, if it attends
    std::unique_ptr<AttentionState> own;
    std::unique_ptr<RecurrentState> recurrent;
    size_t plan;  // if it attends
    PromptMemory prompt;
    std::vector<SetReads> reads;  // of the prompt from now on, [n_sets]: by the policy, or all
    AttentionError error = {};
    std::shared_ptr<ReceivedAttention> received = {};  // if rows may be evicted; with whom it shares them
    size_t chunk = 0;                                  // see LayerKeeps
  };
  struct Mark {
    size_t position;
    std::vector<uint8_t> state;
  };

  // Calls f for what every layer keeps itself.
  template <typename F>
  void for_each_state(const F& f) const {
    for (const Layer& layer : layers_) {
      if (layer.own) f(*layer.own);
      if (layer.recurrent) f(*layer.recurrent);
    }
  }
  // Makes all plans anew, of other shapes.
  void change_plans(const std::function<void(AttentionShape&)>& change);
  static size_t most_decoded(const SequenceShape& shape) {
    return shape.evicts || !shape.looks_ahead ? 1 : std::min(kMaxDecodeTokens, shape.batch_size);
  }
  void settle() const;  // the states of recurrent layers, after a call that looked ahead
  bool can_rewind_to(size_t position) const;  // without a mark
  void drop_marks();
  void rewind_layers(size_t position);
  size_t n_sets(size_t layer) const { return attends(layer) ? plan(layer).shape.n_sets() : 0; }
  bool has_dense_sets(size_t layer) const {  // and no others
    const std::vector<SetReads>& reads = layers_[layer].reads;
    return std::all_of(reads.begin(), reads.end(), [](SetReads set) { return set == SetReads::kAll; });
  }
  // Of a layer whose queries see the chunk that they are in; returns the pairs.
  uint64_t attend_chunks(size_t layer, MatView<const float> q, PromptEnd end, uint8_t* scratch,
                         size_t n_threads, MatView<float> out);
  uint64_t attend_guarded(size_t layer, MatView<const float> q, PromptEnd end, uint8_t* scratch,
                          size_t n_threads, MatView<float> out);
  bool exceeds(size_t layer, const AttentionError& error) const {
    return error.relative() > shape_.guard.limit_of(layer, n_layers());
  }
  void choose_again(size_t layer);
  // Adds what queries give every key to sums, of the KV heads that are wanted: q are those of the latest
  // token and of every step-th before it.
  template <typename F>
  void add_weights(size_t layer, MatView<const float> q, size_t step, KeySums sums, uint8_t* scratch,
                   size_t n_threads, const F& is_wanted) {
    const AttentionPlan& plan = this->plan(layer);
    const LayerKv& kv = this->layer(layer).rows();
    const size_t begin = this->layer(layer).n_tokens() - 1 - (q.rows - 1) * step;
    for (size_t first = 0; first < q.rows; first += kMaxSummedTokens) {
      const size_t n = std::min(kMaxSummedTokens, q.rows - first);
      DecodeAttention attention(plan, scratch, n_threads);
      for (size_t token = 0; token < n; ++token) {
        const size_t position = begin + (first + token) * step;
        for (size_t head = 0; head < plan.shape.heads.n_kv_heads; ++head) {
          const size_t first_key = is_wanted(head) ? 0 : position;
          attention.set_memory(token, head, MemorySet::all_of({first_key, position}), position, kv);
        }
      }
      attention.run(q.rows_from(first, n), kv, {}, sums);
    }
  }
  void read_as(Layer& layer, size_t set, unsigned number) const;
  // The rest of the prompt has a memory set read all, or no more; and so do generated tokens, if the policy
  // goes by what it has seen of the prompt.
  void let_decode_read_all(Layer& layer, size_t set, bool reads_all) const {
    if (needs_.ends_by_scores) layer.prompt.read_all(set, reads_all);
  }
  size_t owner_of(size_t layer) const;
  std::vector<int32_t> choose_dropped(size_t layer, size_t n_dropped, std::vector<float>* scores);
  void move_rows(size_t layer, const std::vector<int32_t>& dropped, size_t n_dropped,
                 const Rotation& rotation);
  void restart_policy(const std::vector<std::vector<int32_t>>& dropped,
                      const std::vector<std::vector<float>>& scores, size_t n_dropped, size_t n);
  void note_chosen(size_t layer, const ChosenPositions& chosen, size_t row, size_t position);
  size_t n_kv_heads_before(size_t layer) const;
  bool ends_prompts() const { return needs_.ends_prompts; }

  SequenceShape shape_;
  std::shared_ptr<SparsePolicy> policy_;
  PolicyShape kv_shape_;  // its slots in decode
  const KernelTable& table_;
  PolicyNeeds needs_;
  std::vector<AttentionPlan> plans_;        // one for all layers of equal heads
  std::vector<AttentionPlan> dense_plans_;  // for calls with a window, where the policy splits groups
  std::vector<Layer> layers_;
  size_t n_all_sets_ = 0;  // of all layers
  bool is_recurrent_ = false;
  Arena arena_;  // of the rows of all layers
  // Of the prompts: apart from the rows, with which they would share huge pages, and take memory (16 MiB
  // beside 4,096 tokens of SmolLM2-135M) before there is a generated token.
  Arena prompt_arena_;
  std::vector<int32_t> tokens_;
  std::vector<int32_t> ahead_;  // whose rows follow those of the last token
  std::vector<Mark> marks_;     // ascending
  size_t prefill_end_ = 0;
  size_t call_begin_ = 0;
  size_t n_evicted_ = 0;
  size_t n_repeats_ = 0;                // memory sets of the call that were read twice
  std::vector<AttentionError> errors_;  // of the memory sets of the layer at hand
  std::vector<SetReads> again_;         // and which of them are read twice
  std::vector<float> sampled_;          // what its keys received, [n_kv_heads][n_tokens]
  size_t n_dense_reads_ = 0;
  uint64_t n_pairs_ = 0;        // summed over layers and KV heads
  uint64_t n_pairs_dense_ = 0;  // summed over layers
  std::vector<std::vector<int32_t>> reads_;
  uint64_t n_decode_bytes_ = 0;
  bool is_broken_ = false;  // a call is running or was interrupted
};

}  // namespace edgeh2o
