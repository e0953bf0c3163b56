// What a sparse attention algorithm is to the attention op: per layer and KV head (a "slot"), or query head
// where it splits groups, a rule that names the past positions that the next chunk of the prompt, or the next
// generated token, may read. A chunk always reads itself, causally.
//
// For every chunk that begins after position 0, in this order and per slot:
//   observe_intra and observe_memory of the chunk before, if scored and if that chunk was not the prompt's
//   last; select of the chunk.
// The slots of one layer are served in parallel, so mutable state is per slot, or has a lock. Hooks must not
// throw and must not allocate; begin_session allocates.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/byte_stream.h"
#include "base/kv_rows.h"
#include "base/mat_view.h"
#include "sparse/eviction.h"

namespace edgeh2o {

// One memory set of one layer: that of a KV head, or of a query head.
struct SlotShape {
  size_t layer = 0;
  size_t index = 0;       // among those of the layer
  size_t group_size = 0;  // query heads that share it
  size_t key_dim = 0, value_dim = 0;
  size_t n_sharing = 1;  // slots of one KV head
  size_t kv_slot = 0;    // which of PolicyShape::of_kv_heads() is that of its KV head
};

struct PolicyShape {
  std::vector<SlotShape> slots;                                    // layer by layer
  std::vector<size_t> first_slots;                                 // of every layer
  size_t max_layer_slots = 0, max_key_dim = 0, max_value_dim = 0;  // of a layer
  size_t max_context = 0;
  size_t chunk_size = 0;  // longest chunk

  // n_layer_slots like `slot`.
  void add_layer(size_t n_layer_slots, const SlotShape& slot);
  size_t n_slots() const { return slots.size(); }
  size_t n_layers() const { return first_slots.size(); }
  size_t n_slots(size_t layer) const {
    return (layer + 1 < n_layers() ? first_slots[layer + 1] : n_slots()) - first_slots[layer];
  }
  size_t slot(size_t layer, size_t index) const { return first_slots[layer] + index; }
  // The same with one slot for every KV head.
  PolicyShape of_kv_heads() const;
};

// Positions [begin, end).
struct PositionRange {
  size_t begin = 0, end = 0;
  size_t size() const { return end - begin; }
};

// Key and value rows that stand for no single position; they are read, never scored.
struct SyntheticRows {
  const float* k = nullptr;       // [count][key_dim]
  const float* v = nullptr;       // [count][value_dim]
  const float* biases = nullptr;  // [count], added to the scaled logits
  size_t count = 0;
  // [count] instead of k and v, if SelectionInput takes that: a row is the mean of these positions without
  // those that the set lists.
  const PositionRange* means = nullptr;
};

// What a chunk reads besides itself. Positions stay valid until the slot's next choice, synthetic rows
// until the next layer's.
struct MemorySet {
  PositionRange range;                 // used if `positions` is null
  const int32_t* positions = nullptr;  // ascending, unique, before the chunk
  size_t n_listed = 0;
  SyntheticRows synthetic;

  static MemorySet all_of(PositionRange range) {
    MemorySet set;
    set.range = range;
    return set;
  }
  // Everything before a token, or what its window has of it (0: there is none).
  static MemorySet all_seen(size_t position, size_t window) {
    return all_of({window == 0 || window > position ? 0 : position + 1 - window, position});
  }
  static MemorySet list(const int32_t* positions, size_t count) {
    MemorySet set;
    set.positions = positions;
    set.n_listed = count;
    return set;
  }
  // For assertions: whether the positions ascend and lie before `end`.
  bool is_valid(size_t end) const;
  size_t n_positions() const { return positions ? n_listed : range.size(); }
  size_t n_rows() const { return n_positions() + synthetic.count; }
};

// Throws std::invalid_argument unless the positions ascend from 0 or more and lie before `end`.
void check_positions(Span<const int32_t> positions, size_t end);

// Column sums: what every key received from the chunk's queries, summed over the query heads of the group.
enum class ColumnSums : uint8_t {
  kNone,
  kPerPart,  // of weights normalised within the chunk, and within the memory's positions
  kJoint,    // of the weights of the one softmax over everything that is read
};

// What a query's weights count in the column sums.
enum class QueryWeights : uint8_t {
  kOne,
  kVisibleKeys,  // as often as the number of keys that share the query's softmax (not with kJoint)
  kLastQueries,  // 1 for the last n_last_queries of a chunk, 0 for the others
};

struct PolicyNeeds {
  ColumnSums column_sums = ColumnSums::kNone;
  QueryWeights query_weights = QueryWeights::kOne;
  size_t n_last_queries = 0;
  size_t max_scored_memory = 0;     // most positions of a memory set in a scored slot
  size_t max_synthetic = 0;         // most synthetic rows of a memory set
  size_t max_decode_synthetic = 0;  // and of what a generated token reads
  size_t max_scored_pages = 0;      // most pages that a slot has scored at once
  // Last queries of the prompt that read their whole past, as far as the call reaches that ends it.
  size_t n_dense_tail = 0;
  bool reads_all = false;  // every chunk reads its whole past
  // What choices look at, all that they get where attention runs on a device. Scores of pages do not count as
  // a look at the queries.
  bool looks_at_past = false, looks_at_queries = false;
  bool ends_prompts = false;    // end_prompt is asked
  bool ends_by_scores = false;  // and goes by the scores of all chunks of the prompt
  // Queries of a prompt, every second of its last ones, whose weights over everything the sampled slots get,
  // and a part of them of every call before its last, from so many tokens on.
  size_t n_sampled_queries = 0, sampled_from = 0;
};

// Finds out which pages of past keys a chunk's queries ask for; see PageRecall.
class PageScorer {
 public:
  virtual ~PageScorer() = default;
  // out[n_pages]: sum over the query rows of the squared softmax over the pages of the largest logit that a
  // page may have. queries as in SelectionInput; bounds: [n_pages][2 * key_dim], maxima of the keys, then
  // minima.
  virtual void score(size_t index, MatView<const float> queries, const float* bounds, size_t n_pages,
                     float* out) const = 0;
};

// What pages are kept and scored with in decode; see page_bounds.h.
struct PageKernels {
  // One row of the type.
  void (*store_row)(CacheType type, uint8_t* out, const float* x, size_t head_dim) = nullptr;
  // out[n_rows][out_stride] = products of the query rows with the pages of n_blocks blocks, over n_channels
  // channels: those listed, or the first if that is null.
  void (*score_blocks)(float* out, size_t out_stride, const float* q, size_t q_stride, size_t n_rows,
                       const int32_t* channels, size_t n_channels, const void* blocks, size_t n_blocks,
                       size_t width) = nullptr;
};

enum class Phase : uint8_t { kPrefill, kDecode };

// What a choice may look at. In decode the chunk is one generated token.
struct SelectionInput {
  PositionRange chunk;
  MatView<const float> queries;  // [chunk.size()][group_size * key_dim], rotary embedding applied, not scaled
  KvRows past_keys, past_values;  // positions up to the chunk's last are written
  // out[head_dim] += the rows at `positions`, or rows 0 to n_rows - 1 if that is null.
  void (*add_kv_rows)(CacheType type, float* out, const void* rows, const int32_t* positions, size_t n_rows,
                      size_t head_dim) = nullptr;
  const PageScorer* page_scorer = nullptr;    // for as many pages as needs() says; null in decode
  const PageKernels* page_kernels = nullptr;  // in decode and at the end of a prompt
  bool takes_means = false;                   // see SyntheticRows
  // On the CPU, for choices of chunks and of end_prompt: out[head_dim] += the squares of n_rows rows. For
  // those of chunks: what logits are multiplied by, 0 elsewhere.
  void (*add_kv_squares)(CacheType type, float* out, const void* rows, size_t n_rows,
                         size_t head_dim) = nullptr;
  float scale = 0.0f;
};

// Numbers of tokens, none by default.
struct PromptLengths {
  size_t least = SIZE_MAX, most = 0;
  bool hold(size_t n_tokens) const { return n_tokens >= least && n_tokens <= most; }
};

class SparsePolicy {
 public:
  virtual ~SparsePolicy() = default;
  SparsePolicy() = default;
  SparsePolicy(const SparsePolicy&) = delete;
  SparsePolicy& operator=(const SparsePolicy&) = delete;

  virtual std::string describe() const = 0;

  // Whether every query head of a prompt has a slot, instead of every KV head. Hooks of generated tokens, and
  // observe_sample, always get slots of KV heads, those of shape().of_kv_heads(). An eviction asks the first
  // slot of each KV head.
  virtual bool splits_groups() const { return false; }

  // What the op has to provide, and the bytes that begin_session allocates, for sessions of this shape.
  virtual PolicyNeeds needs(const PolicyShape& shape) const = 0;
  virtual size_t state_bytes(const PolicyShape& shape) const = 0;
  // What of its state is in memory: most grows with the tokens that were read.
  virtual size_t resident_bytes() const { return 0; }

  // Takes the policy for one session, whose prompts follow one another. Throws std::invalid_argument if
  // another session holds it: a policy has one state.
  void begin_session(const PolicyShape& shape);
  void end_session() { is_taken_ = false; }
  const PolicyShape& shape() const { return shape_; }

  // Forgets the prompt.
  virtual void begin_prompt() = 0;

  // Other budgets for the slots, SIZE_MAX for the whole past, between two calls that have read everything so
  // far; and those of KV heads in decode, if there are any. Throws std::invalid_argument for those that it
  // cannot have, or if it has none.
  virtual void set_budgets(const std::vector<size_t>& budgets, const std::vector<size_t>& decode_budgets);

  // Whether the slot gets observe_sample, of calls that ask the policy.
  virtual bool is_sampled(size_t /*slot*/) const { return false; }
  // False: the slot gets no column sums, and its memory may be larger than max_scored_memory.
  virtual bool is_scored(size_t /*slot*/) const { return true; }
  // Whether generated tokens read what select_decode says, instead of everything.
  virtual bool chooses_in_decode() const { return false; }
  MemorySet select(Phase phase, size_t slot, const SelectionInput& input) {
    return phase == Phase::kPrefill ? select_memory(slot, input) : select_decode(slot, input);
  }
  // sums[i]: column sum of the chunk's i-th token.
  virtual void observe_intra(size_t /*slot*/, PositionRange /*chunk*/, Span<const float> /*sums*/) {}
  // sums[i]: column sum of the i-th position of the memory set that the chunk read.
  virtual void observe_memory(size_t /*slot*/, PositionRange /*chunk*/, const MemorySet& /*memory*/,
                              Span<const float> /*sums*/) {}
  // sums[i]: what the i-th token of the prompt received from n_queries at the end of a call, which read all
  // before them, summed over the query heads of the group. Comes before the chunks of the call.
  virtual void observe_sample(size_t /*slot*/, size_t /*n_queries*/, Span<const float> /*sums*/) {}

  // What generated tokens read of the prompt, besides all that was generated: asked before the first of them,
  // if needs() says so, where input.chunk is {n, n} after a prompt of n tokens and there are no queries.
  // Either {0, n}, or at most prompt_rows(slot) positions and synthetic rows. It must depend on the prompt
  // alone, and leave its scores as they are: it is asked again when a saved prompt is taken up. A slot that
  // has no prompt_rows is told that the prompt ends, and is asked by select_decode, token by token.
  virtual size_t prompt_rows(const PolicyShape& /*kv_shape*/, size_t /*slot*/) const { return 0; }
  virtual MemorySet end_prompt(size_t /*slot*/, const SelectionInput& input) {
    return MemorySet::all_of({0, input.chunk.begin});
  }
  // Prompts that generated tokens of a slot without prompt_rows may read, all or parts of them, from a copy
  // in 8 bits.
  virtual PromptLengths rounded_prompts(size_t /*slot*/) const { return {}; }

  // Before select_decode of the slots of a layer: prepare_decode of each, and, if one of them says so,
  // score_decode of all for part 0 to n_parts - 1 of what they choose from, in parallel. What comes out must
  // not depend on n_parts.
  virtual bool prepare_decode(size_t /*slot*/, const SelectionInput& /*input*/) { return false; }
  virtual void score_decode(size_t /*slot*/, const SelectionInput& /*input*/, size_t /*part*/,
                            size_t /*n_parts*/) {}

  // Which positions of a full context go, by default those that received least: n_dropped of them, ascending.
  // Those that stay move up: asked slot by slot, then begin_prompt, then `restart` of the slots that were
  // asked. Not for layers with a window, whose oldest go.
  virtual void evict(size_t /*slot*/, const EvictionInput& input, int32_t* dropped) {
    drop_lowest(input, dropped);
  }
  // The prompt so far is what an eviction left: positions 0 to scores.size - 1, which scored so much in it.
  virtual void restart(size_t /*slot*/, Span<const float> /*scores*/) {}

  // Bytes of its own memory that score_decode reads for a token: what bench and statistics count.
  virtual size_t choice_bytes(size_t /*slot*/) const { return 0; }

  // Called once after the choices of every layer of a call, by the calling thread; the one place where a
  // policy may throw.
  virtual void end_layer() {}

  // Forgets what it noted of generated tokens from n_tokens on; those of the prompt lie before.
  virtual void rewind(size_t /*n_tokens*/) {}

  // Saved states: what later chunks of this prompt depend on, once all layers have read n_tokens tokens.
  // `load` finds the policy as begin_prompt leaves it, and bytes from anywhere: it throws
  // std::invalid_argument for what this policy could not have saved, after which begin_prompt is called
  // again. A policy that cannot be saved refuses both.
  virtual bool can_be_saved() const { return false; }
  virtual void save(size_t n_tokens, ByteWriter& out) const;
  virtual void load(size_t n_tokens, ByteReader& in);

  // For inspection: the memory set that the slot's latest chunk read, and the accumulated scores by position
  // that the next choice goes by, [max_context] (empty if the algorithm keeps none).
  virtual MemorySet memory(size_t slot) const = 0;
  virtual std::vector<float> scores(size_t /*slot*/) const { return {}; }

 protected:
  virtual void allocate(const PolicyShape& shape) = 0;

  virtual MemorySet select_memory(size_t slot, const SelectionInput& input) = 0;
  // Listed positions, with synthetic rows, or a range that ends with the token's. Scores and memory sets of
  // the prompt stay as they are.
  virtual MemorySet select_decode(size_t /*slot*/, const SelectionInput& input) {
    return MemorySet::all_of({0, input.chunk.begin});
  }

 private:
  PolicyShape shape_;
  bool is_taken_ = false;
};

}  // namespace edgeh2o
