// Sparse policies: how they are made, and what they show.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/check.h"
#include "bindings/python_policy.h"
#include "bindings/register.h"
#include "sparse/policy_registry.h"

namespace py = pybind11;

namespace edgeh2o {
namespace {

using PolicyPtr = std::shared_ptr<SparsePolicy>;

size_t checked_slot(const SparsePolicy& policy, size_t layer, size_t kv_head) {
  const PolicyShape& shape = policy.shape();
  EH2O_CHECK(shape.n_slots() > 0, "this policy serves no session yet");
  EH2O_CHECK(layer < shape.n_layers() && kv_head < shape.n_slots(layer), "layer ", layer, ", KV head ",
             kv_head, " does not exist; there are ", shape.n_layers(), " layers with ", shape.n_slots(),
             " KV heads");
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

void set_budgets(SparsePolicy& policy, const std::vector<std::optional<size_t>>& budgets,
                 const std::vector<std::optional<size_t>>& decode_budgets) {
  EH2O_CHECK(policy.shape().n_slots() > 0, "this policy serves no session yet");
  const auto counts = [](const std::vector<std::optional<size_t>>& budgets) {
    std::vector<size_t> result;
    for (const auto& budget : budgets) result.push_back(budget.value_or(SIZE_MAX));
    return result;
  };
  policy.set_budgets(counts(budgets), counts(decode_budgets));
}

PolicyPtr make_named_policy(const std::string& name, const py::kwargs& options) {
  std::map<std::string, PolicyOptions::Value> values;
  for (const auto& [key, value] : options) {
    const auto option = key.cast<std::string>();
    try {
      values[option] = value.cast<PolicyOptions::Value>();
    } catch (const py::cast_error&) {
      throw_invalid(option, " must be a number, text, or a list of whole numbers from 0 on and None");
    }
  }
  return make_policy(name, PolicyOptions(std::move(values)));
}

// A function NAME_policy for every policy, whose first options need no names.
void bind_policies(py::module_& module) {
  for (const auto& [name, registration] : registered_policies()) {
    const PolicyRegistration* policy = registration;
    module.def((name + "_policy").c_str(), [policy](const py::args& args, const py::kwargs& kwargs) {
      if (args.size() > policy->first_options.size()) {
        throw py::type_error(policy->name + "_policy takes at most " +
                             std::to_string(policy->first_options.size()) + " positional arguments");
      }
      for (size_t i = 0; i < args.size(); ++i) kwargs[policy->first_options[i].c_str()] = args[i];
      return make_named_policy(policy->name, kwargs);
    });
  }
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
  needs.looks_at_past = needs.looks_at_queries = true;
  return std::make_shared<PythonPolicy>(std::move(rule), needs);
}

}  // namespace

void bind_attention(py::module_& module) {
  py::class_<SparsePolicy, PolicyPtr>(module, "SparsePolicy")
      .def_property_readonly("splits_groups", &SparsePolicy::splits_groups)
      .def("memory_set", &memory_set, py::arg("layer"), py::arg("head"))
      .def("scores", &scores, py::arg("layer"), py::arg("head"), py::arg("n") = py::none())
      .def("set_budgets", &set_budgets, py::arg("budgets"),
           py::arg("decode_budgets") = std::vector<std::optional<size_t>>{})
      .def("__repr__",
           [](const SparsePolicy& policy) { return "<SparsePolicy: " + policy.describe() + ">"; });
  module.def("make_policy", &make_named_policy, py::arg("name"));
  bind_policies(module);
  module.def("python_policy", &make_python_policy, py::arg("rule"), py::kw_only(),
             py::arg("column_sums") = "none", py::arg("max_memory") = 0, py::arg("max_synthetic") = 0);
}

}  // namespace edgeh2o
