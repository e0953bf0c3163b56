// A policy as somebody would add it: this file in cpp/sparse/, and tests/sparse/every_other.py in
// edgeh2o/attention/. A chunk reads every n-th position before it, and so does a generated token.
#include "base/check.h"
#include "sparse/policy_registry.h"

namespace edgeh2o {
namespace {

class EveryOtherPolicy final : public SparsePolicy {
 public:
  explicit EveryOtherPolicy(size_t step) : step_(step) { EH2O_CHECK(step > 0, "step must be at least 1"); }

  std::string describe() const override { return "every_other, step " + std::to_string(step_); }
  PolicyNeeds needs(const PolicyShape&) const override { return {}; }
  size_t state_bytes(const PolicyShape& shape) const override {
    return shape.n_slots() * shape.max_context * sizeof(int32_t);
  }
  void begin_prompt() override { sizes_.assign(shape().n_slots(), 0); }
  bool is_scored(size_t) const override { return false; }
  MemorySet memory(size_t slot) const override {
    return MemorySet::list(positions_.data() + slot * shape().max_context, sizes_[slot]);
  }

 protected:
  void allocate(const PolicyShape& shape) override {
    positions_.resize(shape.n_slots() * shape.max_context);
    sizes_.resize(shape.n_slots());
  }
  MemorySet select_memory(size_t slot, const SelectionInput& input) override {
    int32_t* positions = positions_.data() + slot * shape().max_context;
    size_t count = 0;
    for (size_t i = 0; i < input.chunk.begin; i += step_) positions[count++] = static_cast<int32_t>(i);
    sizes_[slot] = count;
    return memory(slot);
  }
  bool chooses_in_decode() const override { return true; }
  MemorySet select_decode(size_t slot, const SelectionInput& input) override {
    return select_memory(slot, input);
  }

 private:
  size_t step_;
  std::vector<int32_t> positions_;
  std::vector<size_t> sizes_;
};

const PolicyRegistration kEveryOtherRegistration(
    "every_other", {"step"}, [](PolicyOptions& settings) -> std::shared_ptr<SparsePolicy> {
      return std::make_shared<EveryOtherPolicy>(settings.count("step", 2));
    });

}  // namespace
}  // namespace edgeh2o
