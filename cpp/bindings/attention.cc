// Sparse policies: how they are made, and what they show.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "base/check.h"
#include "bindings/python_policy.h"
#include "bindings/register.h"
#include "sparse/dense_policy.h"
#include "sparse/h2o_policy.h"
#include "sparse/headwise_policy.h"

namespace py = pybind11;

namespace edgeh2o {
namespace {

using PolicyPtr = std::shared_ptr<SparsePolicy>;

size_t checked_slot(const SparsePolicy& policy, size_t layer, size_t kv_head) {
  const PolicyShape& shape = policy.shape();
  EH2O_CHECK(shape.n_slots() > 0, "this policy serves no session yet");
  EH2O_CHECK(layer < shape.n_layers && kv_head < shape.n_kv_heads, "layer ", layer, ", KV head ", kv_head,
             " does not exist; there are ", shape.n_layers, " layers of ", shape.n_kv_heads);
  return shape.slot(layer, kv_head);
}

py::array_t<int32_t> memory_set(const SparsePolicy& policy, size_t layer, size_t kv_head) {
  const MemorySet memory = policy.memory(checked_slot(policy, layer, kv_head));
  py::array_t<int32_t> positions(static_cast<py::ssize_t>(memory.n_positions()));
  int32_t* out = positions.mutable_data();
  for (size_t i = 0; i < memory.n_positions(); ++i) {
    out[i] = memory.positions ? memory.positions[i] : static_cast<int32_t>(memory.range.begin + i);
  }
  return positions;
}

py::array_t<float> scores(const SparsePolicy& policy, size_t layer, size_t kv_head, std::optional<size_t> n) {
  const std::vector<float> all = policy.scores(checked_slot(policy, layer, kv_head));
  EH2O_CHECK(!all.empty(), "the policy (", policy.describe(), ") keeps no scores");
  const size_t count = n.value_or(all.size());
  EH2O_CHECK(count <= all.size(), "asked for the scores of ", count, " positions, there are ", all.size());
  return py::array_t<float>(static_cast<py::ssize_t>(count), all.data());
}

PolicyPtr make_h2o_policy(size_t local, size_t heavy, size_t sinks, const std::string& score, size_t window,
                          float decay, bool by_values, size_t tail) {
  static constexpr std::pair<const char*, H2OScore> kScores[] = {{"sum", H2OScore::kSum},
                                                                 {"mean", H2OScore::kMean},
                                                                 {"lift", H2OScore::kLift},
                                                                 {"window", H2OScore::kWindow}};
  const auto found =
      std::find_if(std::begin(kScores), std::end(kScores), [&](auto& item) { return score == item.first; });
  EH2O_CHECK(found != std::end(kScores), "score = '", score, "'; it is one of sum, mean, lift, window");
  H2OOptions options;
  options.n_local = local;
  options.n_heavy = heavy;
  options.n_sinks = sinks;
  options.score = found->second;
  options.n_window = window;
  options.decay = decay;
  options.by_values = by_values;
  options.n_tail = tail;
  return std::make_shared<H2OPolicy>(options);
}

PolicyPtr make_headwise_policy(const std::vector<std::optional<size_t>>& budgets, size_t local, size_t sinks,
                               float decay, size_t page_size, size_t max_past, size_t tail) {
  HeadwiseOptions options;
  for (const auto& budget : budgets) options.budgets.push_back(budget.value_or(HeadwiseOptions::kFull));
  options.n_local = local;
  options.n_sinks = sinks;
  options.decay = decay;
  options.page_size = page_size;
  options.max_past = max_past;
  options.n_tail = tail;
  return std::make_shared<HeadwisePolicy>(options);
}

PolicyPtr make_python_policy(py::object rule, const std::string& column_sums, size_t max_memory,
                             size_t max_synthetic) {
  EH2O_CHECK(column_sums == "none" || column_sums == "part" || column_sums == "joint", "column_sums = '",
             column_sums, "'; it is one of none, part, joint");
  const ColumnSums sums = column_sums == "part"    ? ColumnSums::kPerPart
                          : column_sums == "joint" ? ColumnSums::kJoint
                                                   : ColumnSums::kNone;
  PolicyNeeds needs;
  needs.column_sums = sums;
  needs.max_scored_memory = max_memory;
  needs.max_synthetic = max_synthetic;
  return std::make_shared<PythonPolicy>(std::move(rule), needs);
}

}  // namespace

void bind_attention(py::module_& module) {
  py::class_<SparsePolicy, PolicyPtr>(module, "SparsePolicy")
      .def("memory_set", &memory_set, py::arg("layer"), py::arg("kv_head"))
      .def("scores", &scores, py::arg("layer"), py::arg("kv_head"), py::arg("n") = py::none())
      .def("__repr__",
           [](const SparsePolicy& policy) { return "<SparsePolicy: " + policy.describe() + ">"; });
  module.def("dense_policy", []() -> PolicyPtr { return std::make_shared<DensePolicy>(); });
  module.def("h2o_policy", &make_h2o_policy, py::arg("local"), py::arg("heavy"), py::kw_only(),
             py::arg("sinks") = 0, py::arg("score") = "sum", py::arg("window") = 64, py::arg("decay") = 1.0f,
             py::arg("by_values") = false, py::arg("tail") = 0);
  module.def("headwise_policy", &make_headwise_policy, py::arg("budgets"), py::kw_only(),
             py::arg("local") = 256, py::arg("sinks") = 4, py::arg("decay") = 0.9f, py::arg("page_size") = 64,
             py::arg("max_past") = 8192, py::arg("tail") = 0);
  module.def("python_policy", &make_python_policy, py::arg("rule"), py::kw_only(),
             py::arg("column_sums") = "none", py::arg("max_memory") = 0, py::arg("max_synthetic") = 0);
}

}  // namespace edgeh2o
