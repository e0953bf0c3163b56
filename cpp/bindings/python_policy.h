// A sparse prefill algorithm written in Python: slow, exact, for trying ideas and for tests.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "sparse/sparse_policy.h"

namespace edgeh2o {

// Calls the methods of a Python object, with the GIL, from the threads of the op:
//   select_memory(layer, kv_head, chunk, queries, past_keys, past_values) -> positions, or (positions, keys,
//   values, biases) with synthetic rows; and, where the object has them, begin_prompt(), is_scored(layer,
//   kv_head), observe_intra(layer, kv_head, chunk, sums), observe_memory(layer, kv_head, chunk, positions,
//   sums), select_decode with the arguments of select_memory, for positions that a generated token reads,
//   end_prompt(layer, kv_head, n_tokens, keys, values), which answers as select_memory does, and evict(layer,
//   kv_head, n_dropped, scores) -> n_dropped positions.
// An exception of theirs, or an answer that cannot be used, ends up in end_layer as edgeh2o.errors.UsageError
// with the exception as its cause; until then the memory sets are empty.
class PythonPolicy final : public SparsePolicy {
 public:
  // Throws UsageError if the rule has no select_memory.
  PythonPolicy(pybind11::object rule, PolicyNeeds needs);

  std::string describe() const override { return "a rule in Python"; }
  PolicyNeeds needs(const PolicyShape&) const override { return needs_; }
  size_t state_bytes(const PolicyShape&) const override { return 0; }
  void begin_prompt() override;
  bool is_scored(size_t slot) const override { return slots_[slot].is_scored; }
  void observe_intra(size_t slot, PositionRange chunk, Span<const float> sums) override;
  void observe_memory(size_t slot, PositionRange chunk, const MemorySet& memory,
                      Span<const float> sums) override;
  bool chooses_in_decode() const override { return selects_in_decode_; }
  void end_layer() override;
  size_t prompt_rows(const PolicyShape& kv_shape, size_t /*slot*/) const override {
    return needs_.ends_prompts ? kv_shape.max_context : 0;
  }
  MemorySet end_prompt(size_t slot, const SelectionInput& input) override;
  void evict(size_t slot, const EvictionInput& input, int32_t* dropped) override;
  MemorySet memory(size_t slot) const override;

 protected:
  MemorySet select_memory(size_t slot, const SelectionInput& input) override;
  MemorySet select_decode(size_t slot, const SelectionInput& input) override;
  void allocate(const PolicyShape& shape) override;

 private:
  struct Selection {
    std::vector<int32_t> positions;
    std::vector<float> keys, values, biases;  // synthetic rows
    MemorySet set() const;
  };
  struct SlotState {
    bool is_scored = true;
    Selection memory, prompt;
    std::vector<int32_t> decode_positions;
  };

  template <typename F>
  void call_python(const char* method, std::optional<size_t> slot, const F& f);
  pybind11::object ask(const pybind11::object& method, size_t slot, const SelectionInput& input) const;
  static Selection read_selection(const pybind11::object& answer, const SelectionInput& input);

  pybind11::object rule_;
  PolicyNeeds needs_;
  bool selects_in_decode_;
  std::vector<SlotState> slots_;
  std::mutex error_mutex_;
  std::exception_ptr error_;  // the first one since end_layer
};

}  // namespace edgeh2o
