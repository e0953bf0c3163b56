// Every chunk reads the whole past: full attention through the code of the sparse algorithms.
#pragma once

#include <vector>

#include "sparse/sparse_policy.h"

namespace edgeh2o {

class DensePolicy final : public SparsePolicy {
 public:
  std::string describe() const override { return "dense"; }
  PolicyNeeds needs(const PolicyShape&) const override {
    PolicyNeeds needs;
    needs.reads_all = true;
    return needs;
  }
  size_t state_bytes(const PolicyShape& shape) const override { return shape.n_slots() * sizeof(size_t); }
  void begin_prompt() override;
  bool is_scored(size_t) const override { return false; }
  bool can_be_saved() const override { return true; }
  void save(size_t, ByteWriter&) const override {}
  void load(size_t, ByteReader&) override {}
  MemorySet memory(size_t slot) const override { return MemorySet::all_of({0, n_past_[slot]}); }

 protected:
  MemorySet select_memory(size_t slot, const SelectionInput& input) override;
  void allocate(const PolicyShape& shape) override { n_past_.resize(shape.n_slots()); }

 private:
  std::vector<size_t> n_past_;  // per slot
};

}  // namespace edgeh2o
