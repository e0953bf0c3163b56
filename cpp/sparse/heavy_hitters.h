// Accumulated scores of past positions, and the choice of a memory set by them: what the policies with heavy
// hitters share. Candidates of a chunk are the memory set before and the chunk before; a position that is
// dropped never comes back. Positions written by decode belong to the chunk before them, with score 0.
#pragma once

#include <vector>

#include "base/arena.h"
#include "sparse/sparse_policy.h"

namespace edgeh2o {

// How column sums become scores.
struct ScoreRule {
  bool is_mean = false;    // divided by the number of queries that saw the key, at least kMinAge
  float decay = 1.0f;      // factor of the older sums and numbers of queries, at every chunk
  bool by_values = false;  // times the norm of the value row
};

class HeavyHitters {
 public:
  // A mean over fewer queries would let a few of them decide.
  static constexpr float kMinAge = 32.0f;

  // Positions that a memory set holds whatever their score.
  struct Forced {
    size_t n_sinks = 0;  // the first of the prompt
    size_t n_local = 0;  // those just before the chunk
  };

  explicit HeavyHitters(const ScoreRule& rule) : rule_(rule) {}

  // capacities[slot]: positions of a full memory set; 0: the slot has none.
  void take_buffers(Arena& arena, const PolicyShape& shape, const std::vector<size_t>& capacities);
  void begin_prompt();
  // After it: positions 0 to scores.size - 1 have scored so much per query, and may all be chosen.
  void restart(size_t slot, Span<const float> scores);

  // Of the memory sets from now on, up to those of take_buffers; 0: the slot has none any more. The next sets
  // may hold every position that was scored: the ones so far must have held all.
  void set_capacity(size_t slot, size_t capacity);

  // The memory set of the chunk: the forced positions, and up to the capacity those candidates that have the
  // highest scores; ties go to the lower position. n_sinks + n_local must not exceed the capacity.
  MemorySet select(size_t slot, const SelectionInput& input, const Forced& forced);
  // The same with another capacity, written to out [capacity]; the slot stays as it is.
  MemorySet peek(size_t slot, const SelectionInput& input, const Forced& forced, size_t capacity,
                 int32_t* out) const;
  void observe_intra(size_t slot, PositionRange chunk, Span<const float> sums);
  void observe_memory(size_t slot, PositionRange chunk, Span<const float> sums);
  // Instead of both, in slots that are never asked to select: what all tokens so far received of n_queries,
  // at most `most`. Scores are those of about the last `most` queries; all positions are candidates.
  void observe_sample(size_t slot, size_t n_queries, size_t most, Span<const float> sums);
  // Of how many queries those scores are.
  float n_sampled(size_t slot) const { return slots_[slot].n_scored > 0 ? slots_[slot].ages[0] : 0.0f; }

  // As SparsePolicy's.
  void save(ByteWriter& out) const;
  void load(size_t n_tokens, ByteReader& in);

  MemorySet memory(size_t slot) const;
  // [max_context] scores by position, without the norms of value rows.
  std::vector<float> scores(size_t slot) const;

 private:
  struct Slot {
    float* sums = nullptr;          // [max_context]
    float* ages = nullptr;          // [max_context] decayed numbers of queries; null unless scores are means
    int32_t* memory = nullptr;      // [capacity] ascending
    size_t capacity = 0, most = 0;  // of the buffer: most
    size_t n_memory = 0;
    size_t chunk_begin = 0;  // where the latest chunk began
    size_t n_scored = 0;     // positions [0, n_scored) may have sums other than 0
  };

  float score(const Slot& slot, size_t position) const;
  size_t choose(size_t slot, const SelectionInput& input, const Forced& forced, size_t capacity,
                int32_t* out) const;
  uint64_t rank(size_t slot, size_t position, const SelectionInput& input) const;

  ScoreRule rule_;
  PolicyShape shape_;
  Slot* slots_ = nullptr;  // [n_slots]
  // Scratch: the slots of one layer run in parallel.
  uint64_t* ranks_ = nullptr;    // [max_layer_slots][2][max_context]
  float* value_rows_ = nullptr;  // [max_layer_slots][max_value_dim]
};

}  // namespace edgeh2o
