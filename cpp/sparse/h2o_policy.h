// Heavy-hitter oracle (Zhang et al. 2023) at chunk granularity. The memory set of a chunk is
//   local: the last `n_local` positions before it, and
//   heavy: the `n_heavy` best scored of (the memory set before, and the chunk before) without the local ones;
//   ties go
//          to the lower position.
// A token's score is the sum of its column sums, of its own chunk and of every later chunk whose memory held
// it, each normalised within its part. Positions written by decode belong to the chunk before them, with
// score 0.
#pragma once

#include "base/arena.h"
#include "sparse/sparse_policy.h"

namespace edgeh2o {

class H2OPolicy final : public SparsePolicy {
 public:
  // Throws std::invalid_argument if both are 0.
  H2OPolicy(size_t n_local, size_t n_heavy);

  std::string describe() const override;
  PolicyNeeds needs(const PolicyShape& shape) const override;
  size_t state_bytes(const PolicyShape& shape) const override;
  void begin_prompt() override;
  MemorySet select_memory(size_t slot, const SelectionInput& input) override;
  void observe_intra(size_t slot, PositionRange chunk, Span<const float> sums) override;
  void observe_memory(size_t slot, PositionRange chunk, const MemorySet& memory,
                      Span<const float> sums) override;
  MemorySet memory(size_t slot) const override;
  Span<const float> scores(size_t slot) const override;

 protected:
  void allocate(const PolicyShape& shape) override;

 private:
  struct SlotState {
    size_t n_memory = 0;     // positions in the memory set
    size_t chunk_begin = 0;  // where the latest chunk began
    size_t n_scored = 0;     // positions [0, n_scored) may have scores other than 0
  };

  size_t memory_capacity(const PolicyShape& shape) const;
  void take_buffers(Arena& arena, const PolicyShape& shape);
  uint64_t rank(size_t slot, size_t position) const;

  size_t n_local_, n_heavy_;
  Arena arena_;
  SlotState* slots_ = nullptr;      // [n_slots]
  float* scores_ = nullptr;         // [n_slots][max_context]
  int32_t* memory_ = nullptr;       // [n_slots][memory_capacity]
  uint64_t* candidates_ = nullptr;  // [n_kv_heads][max_context]: the slots of one layer run in parallel
};

}  // namespace edgeh2o
