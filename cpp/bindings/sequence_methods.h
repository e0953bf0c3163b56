// What every sequence offers to Python, whatever runs it. T has members `sequence` and `policy`, forgets with
// `forget_prompt` what it knows of the end of the prompt, and with `fetch_rows` and `fetch_states` brings
// cached rows and recurrent states that are kept elsewhere, on a device, to the sequence.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/check.h"
#include "bindings/buffers.h"
#include "sequence/sequence.h"

namespace edgeh2o {

using TokenArray = pybind11::array_t<int32_t, pybind11::array::c_style>;

inline SequenceShape make_shape(size_t max_context, size_t batch_size, size_t chunk_size,
                                const std::string& cache_type, const std::string& precision, bool all_rows,
                                const ErrorGuard& guard = {}) {
  EH2O_CHECK(chunk_size > 0 && chunk_size <= batch_size, "chunk_size = ", chunk_size,
             " is not between 1 and batch_size = ", batch_size);
  EH2O_CHECK(batch_size % chunk_size == 0, "batch_size = ", batch_size,
             " is not a multiple of chunk_size = ", chunk_size);
  return {max_context,
          batch_size,
          chunk_size,
          parse_cache_types(cache_type),
          parse_attention_precision(precision),
          all_rows,
          guard};
}

inline Span<const int32_t> view_tokens(const TokenArray& tokens) {
  EH2O_CHECK(tokens.ndim() == 1, "tokens must be one-dimensional, got ", tokens.ndim(), " dimensions");
  return {tokens.data(), static_cast<size_t>(tokens.size())};
}

// What runs between layers, with the GIL: delivers Ctrl-C, then reports progress. For as long as on_layer
// lives.
inline std::function<void(size_t, size_t)> layer_reporter(const pybind11::object& on_layer) {
  return [&on_layer](size_t done, size_t total) {
    const pybind11::gil_scoped_acquire acquire;
    if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
    if (!on_layer.is_none()) on_layer(done, total);
  };
}

inline pybind11::dict to_dict(const SequenceBytes& bytes, size_t activations) {
  pybind11::dict result;
  result["kv_cache"] = bytes.kv_cache;
  if (bytes.recurrent > 0) result["recurrent_state"] = bytes.recurrent;
  if (bytes.ahead > 0) result["recurrent_ahead"] = bytes.ahead;
  if (activations > 0) result["activations"] = activations;
  result["scratch"] = bytes.scratch;
  result["scores"] = bytes.policy;
  return result;
}

inline pybind11::bytes to_bytes(Span<const uint8_t> bytes) {
  return {reinterpret_cast<const char*>(bytes.data), bytes.size};
}

// Adds to `views` one writable view per KV head of a layer: its keys, then its values if they are others.
inline void append_rows(pybind11::list& views, const AttentionState& state, const pybind11::object& owner) {
  const auto append = [&](const KvRows& rows) {
    const Span<uint8_t> bytes = state.written(rows);
    views.append(pybind11::array_t<uint8_t>(static_cast<pybind11::ssize_t>(bytes.size), bytes.data, owner));
  };
  for (size_t head = 0; head < state.n_kv_heads(); ++head) {
    append(state.rows().k(head));
    if (!state.values_are_keys()) append(state.rows().v(head));
  }
  if (state.has_index()) append(state.index_rows());
}

// Positions as Python counts them, evicted tokens included, and those of the cache.
inline size_t counted(const Sequence& sequence, size_t row) {
  return row == 0 ? 0 : row + sequence.n_evicted();
}
inline size_t row_of(const Sequence& sequence, size_t position) {
  return position - std::min(position, sequence.n_evicted());
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
            const size_t row = row_of(self.sequence, position);
            EH2O_CHECK(row > 0 || position == 0, "cannot go back to position ", position,
                       ": what lies there was evicted");
            const bool goes_before_the_end = row < self.sequence.prefill_end();
            self.sequence.rewind(row);
            if (goes_before_the_end) self.forget_prompt();
          },
          py::arg("position"))
      .def("mark",
           [](T& self) {
             self.fetch_states();
             return self.sequence.mark();
           })
      .def_property_readonly("marks", [](const T& self) { return self.sequence.marks(); })
      .def_property_readonly("mark_states",
                             [](const T& self) {
                               py::list states;
                               for (const Span<const uint8_t>& state : self.sequence.mark_states())
                                 states.append(to_bytes(state));
                               return states;
                             })
      .def(
          "find_mark",
          [](const T& self, size_t position) {
            return counted(self.sequence, self.sequence.find_mark(row_of(self.sequence, position)));
          },
          py::arg("position"))
      .def("save_state",
           [](T& self) {
             self.fetch_states();
             const std::vector<uint8_t> state = self.sequence.save_state();
             return to_bytes({state.data(), state.size()});
           })
      .def("cached_rows",
           [](const std::shared_ptr<T>& self) {
             self->fetch_rows();
             py::list views;
             for (size_t i = 0; i < self->sequence.n_layers(); ++i) {
               if (!self->sequence.has_own_rows(i)) continue;
               append_rows(views, self->sequence.layer(i), py::cast(self));
             }
             return views;
           })
      .def_property_readonly("error_sums",
                             [](const T& self) {
                               const size_t n_layers = self.sequence.n_layers();
                               py::array_t<double> sums({n_layers, size_t{2}});
                               for (size_t i = 0; i < n_layers; ++i) {
                                 sums.mutable_at(i, 0) = self.sequence.error(i).difference;
                                 sums.mutable_at(i, 1) = self.sequence.error(i).dense;
                               }
                               return sums;
                             })
      .def_property_readonly("decode_bytes", [](const T& self) { return self.sequence.decode_bytes(); })
      .def_property_readonly("n_dense_reads", [](const T& self) { return self.sequence.n_dense_reads(); })
      .def_property_readonly(
          "prefill_end", [](const T& self) { return counted(self.sequence, self.sequence.prefill_end()); })
      .def_property_readonly("policy", [](const T& self) { return self.policy; });
}

inline void load_states(Sequence& sequence, const pybind11::buffer& state,
                        const std::vector<pybind11::buffer>& marks) {
  const pybind11::buffer_info info = state.request();
  std::vector<pybind11::buffer_info> mark_infos;
  std::vector<Span<const uint8_t>> mark_states;
  for (const pybind11::buffer& mark : marks) {
    mark_infos.push_back(mark.request());
    mark_states.push_back(contiguous_bytes(mark_infos.back(), "the state of a mark"));
  }
  sequence.load_states(contiguous_bytes(info, "the state"), mark_states);
}

template <typename T>
void load_state(T& self, const pybind11::buffer& state, const std::optional<std::vector<int32_t>>& tokens,
                const std::vector<pybind11::buffer>& marks) {
  self.forget_prompt();
  load_states(self.sequence, state, marks);
  if (tokens) {
    const size_t position = self.sequence.position();
    if (tokens->size() != position) {
      self.sequence.reset();
      throw_invalid("it is of ", position, " tokens, not ", tokens->size());
    }
    self.sequence.append_tokens({tokens->data(), tokens->size()});
  }
  self.expect_rows();
}

// What the sequence of a decoder offers besides. T has `prompt_logits`, vocab_size(), n_attending() layers
// that count pairs, and is told by `expect_rows` that the caller writes the cached rows of a state that was
// loaded.
template <typename T, typename Class>
void bind_prompt_methods(Class& c) {
  namespace py = pybind11;
  bind_sequence_methods<T>(c);
  c.def("load_state", &load_state<T>, py::arg("state"), py::arg("token_ids") = py::none(),
        py::arg("marks") = std::vector<py::buffer>())
      .def_readwrite("prompt_logits", &T::prompt_logits)
      .def_property_readonly("token_ids",
                             [](const T& self) {
                               py::list ids;
                               for (const int32_t token : self.sequence.tokens()) ids.append(token);
                               return ids;
                             })
      .def_property_readonly("position",
                             [](const T& self) { return counted(self.sequence, self.sequence.position()); })
      .def_property_readonly("n_evicted", [](const T& self) { return self.sequence.n_evicted(); })
      .def_property_readonly("max_context", [](const T& self) { return self.sequence.shape().max_context; })
      .def_property_readonly("batch_size", [](const T& self) { return self.sequence.shape().batch_size; })
      .def_property_readonly("chunk_size", [](const T& self) { return self.sequence.shape().chunk_size; })
      .def_property_readonly("vocab_size", &T::vocab_size)
      .def_property_readonly("pairs_computed",
                             [](const T& self) { return self.sequence.pairs_computed(self.n_attending()); })
      .def_property_readonly("pairs_dense",
                             [](const T& self) { return self.sequence.pairs_dense(self.n_attending()); })
      .def_property_readonly("memory_bytes", &T::memory_bytes);
}

}  // namespace edgeh2o
