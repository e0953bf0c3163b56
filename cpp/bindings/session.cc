#include "model/session.h"

#include <pybind11/functional.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "base/allocation_counter.h"
#include "base/check.h"
#include "bindings/buffers.h"
#include "bindings/register.h"
#include "isa/select.h"

namespace py = pybind11;

namespace edgeh2o {
namespace {

using TokenArray = py::array_t<int32_t, py::array::c_style>;

py::array_t<float> copy_logits(const float* logits, size_t vocab_size) {
  return py::array_t<float>(static_cast<py::ssize_t>(vocab_size), logits);
}

py::array_t<float> copy_rows(const MatView<const float>& rows) {
  return py::array_t<float>({rows.rows, rows.cols}, {rows.stride * sizeof(float), sizeof(float)}, rows.data);
}

// Runs between layers with the GIL: delivers Ctrl-C, then reports progress.
Decoder::Observer make_observer(const py::object& on_layer, const py::object& on_attention) {
  Decoder::Observer observer;
  observer.on_layer = [&on_layer](size_t done, size_t total) {
    const py::gil_scoped_acquire acquire;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (!on_layer.is_none()) on_layer(done, total);
  };
  if (!on_attention.is_none()) {
    observer.on_attention = [&on_attention](const Decoder::AttentionView& view) {
      const py::gil_scoped_acquire acquire;
      on_attention(view.layer, copy_rows(view.residual), copy_rows(view.q), copy_rows(view.k),
                   copy_rows(view.v), copy_rows(view.attended));
    };
  }
  return observer;
}

py::object prefill(Session& session, const TokenArray& tokens, bool is_last, bool stays_open,
                   const py::object& on_layer, const py::object& on_attention) {
  EH2O_CHECK(tokens.ndim() == 1, "tokens must be one-dimensional, got ", tokens.ndim(), " dimensions");
  const size_t n_tokens = static_cast<size_t>(tokens.size());
  const Decoder::Observer observer = make_observer(on_layer, on_attention);
  const int32_t* token_data = tokens.data();
  const float* last = nullptr;
  {
    const py::gil_scoped_release release;
    last = session.prefill(token_data, n_tokens, prompt_end(is_last, stays_open), observer);
  }
  if (last) return copy_logits(last, session.config().vocab_size);
  return py::none();
}

py::array_t<float> row_logits(Session& session, size_t first, size_t n_rows) {
  EH2O_CHECK(n_rows <= session.shape().batch_size, "a prefill call has at most ", session.shape().batch_size,
             " rows, asked for ", n_rows);
  py::array_t<float> logits({n_rows, session.config().vocab_size});
  float* data = logits.mutable_data();
  {
    const py::gil_scoped_release release;
    session.row_logits(first, n_rows, data);
  }
  return logits;
}

py::array_t<float> decode(Session& session, int32_t token) {
  const float* logits = nullptr;
  {
    const py::gil_scoped_release release;
    logits = session.decode(token);
  }
  return copy_logits(logits, session.config().vocab_size);
}

py::bytes save_state(const Session& session) {
  const std::vector<uint8_t> state = session.save_state();
  return {reinterpret_cast<const char*>(state.data()), state.size()};
}

void load_state(Session& session, const py::buffer& buffer) {
  const py::buffer_info info = buffer.request();
  session.load_state(contiguous_bytes(info, "the state"));
}

// A list of one writable view per KV head: its keys, then its values.
py::list cached_rows(Session& session, size_t layer) {
  EH2O_CHECK(layer < session.config().n_layers, "layer ", layer, " does not exist; there are ",
             session.config().n_layers);
  py::list views;
  for (size_t head = 0; head < session.config().n_kv_heads; ++head) {
    for (const Span<uint8_t>& rows : {session.key_rows(layer, head), session.value_rows(layer, head)}) {
      views.append(py::array_t<uint8_t>(static_cast<py::ssize_t>(rows.size), rows.data, py::cast(session)));
    }
  }
  return views;
}

py::dict to_dict(const SessionBytes& bytes) {
  py::dict result;
  result["kv_cache"] = bytes.kv_cache;
  result["activations"] = bytes.activations;
  result["scratch"] = bytes.attention;
  result["scores"] = bytes.policy;
  return result;
}

}  // namespace

void bind_session(py::module_& module) {
  py::class_<Session>(module, "Session")
      .def(py::init([](std::shared_ptr<Decoder> model, std::shared_ptr<SparsePolicy> policy,
                       size_t max_context, size_t batch_size, size_t chunk_size,
                       const std::string& cache_type, const std::string& precision, bool all_rows) {
             return std::make_unique<Session>(
                 std::move(model), std::move(policy),
                 SessionShape{max_context, batch_size, chunk_size, parse_cache_type(cache_type),
                              parse_attention_precision(precision), all_rows});
           }),
           py::arg("model"), py::arg("policy"), py::kw_only(), py::arg("max_context"), py::arg("batch_size"),
           py::arg("chunk_size"), py::arg("cache_type") = "f16", py::arg("precision") = "f32",
           py::arg("all_rows") = false)
      .def("prefill", &prefill, py::arg("tokens"), py::kw_only(), py::arg("is_last"),
           py::arg("stays_open") = false, py::arg("on_layer") = py::none(),
           py::arg("on_attention") = py::none())
      .def("row_logits", &row_logits, py::arg("first"), py::arg("n_rows"))
      .def("decode", &decode, py::arg("token"))
      .def("reset", &Session::reset)
      .def("rewind", &Session::rewind, py::arg("position"))
      .def("save_state", &save_state)
      .def("load_state", &load_state, py::arg("state"))
      .def("cached_rows", &cached_rows, py::arg("layer"))
      .def_property_readonly("position", &Session::position)
      .def_property_readonly("prefill_end", &Session::prefill_end)
      .def_property_readonly("pairs_computed", &Session::pairs_computed)
      .def_property_readonly("pairs_dense", &Session::pairs_dense)
      .def_property_readonly("last_call_allocations",
                             [](const Session& session) -> std::optional<uint64_t> {
                               if (!kCountsAllocations) return std::nullopt;
                               return session.last_call_allocations();
                             })
      .def_property_readonly("memory_bytes", [](const Session& session) { return to_dict(session.bytes()); })
      .def_static(
          "estimate_bytes",
          [](const DecoderConfig& config, const std::shared_ptr<SparsePolicy>& policy, size_t max_context,
             size_t batch_size, size_t chunk_size, const std::string& cache_type,
             const std::string& precision, bool all_rows) {
            return to_dict(
                Session::estimate_bytes(active_kernel_table(), config, *policy,
                                        {max_context, batch_size, chunk_size, parse_cache_type(cache_type),
                                         parse_attention_precision(precision), all_rows}));
          },
          py::arg("config"), py::arg("policy"), py::kw_only(), py::arg("max_context"), py::arg("batch_size"),
          py::arg("chunk_size"), py::arg("cache_type") = "f16", py::arg("precision") = "f32",
          py::arg("all_rows") = false);
}

}  // namespace edgeh2o
