// Heavy-hitter oracle (Zhang et al. 2023) at chunk granularity. The memory set of a chunk is
//   sinks: the first n_sinks positions of the prompt (none by default),
//   local: the last n_local positions before it, and
//   heavy: the n_heavy best scored of (the memory set before, and the chunk before) without the others;
//   ties go to the lower position.
// By default a token's score is the sum of its column sums, of its own chunk and of every later chunk whose
// memory held it, each normalised within its part.
#pragma once

#include "base/arena.h"
#include "sparse/heavy_hitters.h"
#include "sparse/sparse_policy.h"

namespace edgeh2o {

enum class H2OScore : uint8_t {
  kSum,
  kMean,    // per query that saw the token
  kLift,    // mean, every query's weights times the keys it saw: 1 under uniform attention
  kWindow,  // sum over the last n_window queries of the chunk before; nothing accumulates (SnapKV)
};

struct H2OOptions {
  size_t n_local = 0, n_heavy = 0, n_sinks = 0;
  H2OScore score = H2OScore::kSum;
  size_t n_window = 64;    // of kWindow
  float decay = 1.0f;      // factor of the old score at every chunk
  bool by_values = false;  // score times the norm of the value row
  size_t n_tail = 0;       // last queries of the prompt that read everything
};

class H2OPolicy final : public SparsePolicy {
 public:
  // Throws std::invalid_argument if no position can be kept or decay is not in [0, 1].
  explicit H2OPolicy(const H2OOptions& options);

  std::string describe() const override;
  PolicyNeeds needs(const PolicyShape& shape) const override;
  size_t state_bytes(const PolicyShape& shape) const override;
  size_t resident_bytes() const override { return arena_.resident_bytes(); }
  void begin_prompt() override { hitters_.begin_prompt(); }
  void observe_intra(size_t slot, PositionRange chunk, Span<const float> sums) override {
    hitters_.observe_intra(slot, chunk, sums);
  }
  void observe_memory(size_t slot, PositionRange chunk, const MemorySet&, Span<const float> sums) override {
    hitters_.observe_memory(slot, chunk, sums);
  }
  void restart(size_t slot, Span<const float> scores) override { hitters_.restart(slot, scores); }
  bool can_be_saved() const override { return true; }
  void save(size_t, ByteWriter& out) const override { hitters_.save(out); }
  void load(size_t n_tokens, ByteReader& in) override { hitters_.load(n_tokens, in); }
  MemorySet memory(size_t slot) const override { return hitters_.memory(slot); }
  std::vector<float> scores(size_t slot) const override { return hitters_.scores(slot); }

 protected:
  MemorySet select_memory(size_t slot, const SelectionInput& input) override;
  void allocate(const PolicyShape& shape) override;

 private:
  size_t capacity(const PolicyShape& shape) const;
  void take_buffers(Arena& arena, const PolicyShape& shape);

  H2OOptions options_;
  HeavyHitters hitters_;
  Arena arena_;
};

}  // namespace edgeh2o
