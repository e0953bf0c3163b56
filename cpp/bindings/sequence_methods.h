// What every sequence offers to Python, whatever runs it. T has members `sequence` and `policy`, and forgets
// with `forget_prompt` what it knows of the end of the prompt.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <vector>

#include "base/check.h"
#include "bindings/buffers.h"
#include "sequence/sequence.h"

namespace edgeh2o {

inline pybind11::dict to_dict(const SequenceBytes& bytes, size_t activations) {
  pybind11::dict result;
  result["kv_cache"] = bytes.kv_cache;
  if (activations > 0) result["activations"] = activations;
  result["scratch"] = bytes.scratch;
  result["scores"] = bytes.policy;
  return result;
}

// Adds to `views` one writable view per KV head of a layer: its keys, then its values.
inline void append_rows(pybind11::list& views, const AttentionState& state, const pybind11::object& owner) {
  for (size_t head = 0; head < state.n_kv_heads(); ++head) {
    for (const KvRows& rows : {state.rows().k(head), state.rows().v(head)}) {
      const Span<uint8_t> bytes = state.written(rows);
      views.append(pybind11::array_t<uint8_t>(static_cast<pybind11::ssize_t>(bytes.size), bytes.data, owner));
    }
  }
}

template <typename T, typename Class>
void bind_sequence_methods(Class& c) {
  namespace py = pybind11;
  c.def("reset",
        [](T& self) {
          self.sequence.reset();
          self.forget_prompt();
        })
      .def(
          "rewind",
          [](T& self, size_t position) {
            const bool goes_before_the_end = position < self.sequence.prefill_end();
            self.sequence.rewind(position);
            if (goes_before_the_end) self.forget_prompt();
          },
          py::arg("position"))
      .def("mark", [](T& self) { return self.sequence.mark(); })
      .def_property_readonly("marks", [](const T& self) { return self.sequence.marks(); })
      .def(
          "find_mark", [](const T& self, size_t position) { return self.sequence.find_mark(position); },
          py::arg("position"))
      .def("save_state",
           [](const T& self) {
             const std::vector<uint8_t> state = self.sequence.save_state();
             return py::bytes(reinterpret_cast<const char*>(state.data()), state.size());
           })
      .def("cached_rows",
           [](const std::shared_ptr<T>& self) {
             py::list views;
             for (size_t i = 0; i < self->sequence.n_layers(); ++i) {
               append_rows(views, self->sequence.layer(i), py::cast(self));
             }
             return views;
           })
      .def_property_readonly("prefill_end", [](const T& self) { return self.sequence.prefill_end(); })
      .def_property_readonly("policy", [](const T& self) { return self.policy; });
}

}  // namespace edgeh2o
