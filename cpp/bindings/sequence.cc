// Prompts in the decoder: what Python's runner protocol asks for (edgeh2o/runners/base.py).
#include "sequence/sequence.h"

#include <pybind11/functional.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "base/allocation_counter.h"
#include "base/check.h"
#include "base/parallel.h"
#include "bindings/buffers.h"
#include "bindings/register.h"
#include "bindings/sequence_methods.h"
#include "isa/select.h"
#include "model/decoder.h"

namespace py = pybind11;

namespace edgeh2o {
namespace {

using TokenArray = py::array_t<int32_t, py::array::c_style>;
using PolicyPtr = std::shared_ptr<SparsePolicy>;

// A workspace, and the decoder that it serves.
struct DecoderWorkspace {
  DecoderWorkspace(std::shared_ptr<const Decoder> model, std::optional<int> n_threads)
      : decoder(std::move(model)),
        workspace(decoder->config(), decoder->weights().table(), n_threads.value_or(num_threads())) {}

  std::shared_ptr<const Decoder> decoder;
  Workspace workspace;
};
using WorkspacePtr = std::shared_ptr<DecoderWorkspace>;

SequenceShape make_shape(size_t max_context, size_t batch_size, size_t chunk_size,
                         const std::string& cache_type, const std::string& precision, bool all_rows) {
  EH2O_CHECK(chunk_size > 0 && chunk_size <= batch_size, "chunk_size = ", chunk_size,
             " is not between 1 and batch_size = ", batch_size);
  EH2O_CHECK(batch_size % chunk_size == 0, "batch_size = ", batch_size,
             " is not a multiple of chunk_size = ", chunk_size);
  return {max_context,
          batch_size,
          chunk_size,
          parse_cache_types(cache_type),
          parse_attention_precision(precision),
          all_rows};
}

// A sequence in a decoder.
struct DecoderSequence {
  DecoderSequence(WorkspacePtr shared, PolicyPtr rule, const SequenceShape& shape)
      : owner(std::move(shared)),
        policy(rule),
        sequence(decoder().weights().table(), decoder().config().heads(), rule, shape) {
    decoder().weights().check_complete();
    const py::gil_scoped_release release;  // a call at work may want it
    owner->workspace.fit(shape.batch_size, sequence);
  }

  const Decoder& decoder() const { return *owner->decoder; }
  size_t vocab_size() const { return decoder().config().vocab_size; }
  size_t n_attending() const { return decoder().n_attending_layers(sequence); }
  void forget_prompt() { prompt_logits = py::none(); }

  static py::dict estimate(const DecoderConfig& config, const SparsePolicy& policy,
                           const SequenceShape& shape, std::optional<int> n_threads) {
    const KernelTable& table = active_kernel_table();
    const auto threads = static_cast<size_t>(n_threads.value_or(num_threads()));
    return to_dict(Sequence::estimate_bytes(table, config.heads(), policy, shape, threads),
                   Workspace::estimate_bytes(config, table, shape.batch_size, threads));
  }

  WorkspacePtr owner;
  PolicyPtr policy;
  Sequence sequence;
  py::object prompt_logits = py::none();
  uint64_t last_call_allocations = 0;
};

// Rows as they lie, for as long as the call that gets them: no copy of a prompt's activations.
py::array_t<float> view_rows(const MatView<const float>& rows) {
  py::array_t<float> view({rows.rows, rows.cols}, {rows.stride * sizeof(float), sizeof(float)}, rows.data,
                          py::none());
  view.attr("flags").attr("writeable") = false;
  return view;
}

// Runs between layers with the GIL: delivers Ctrl-C, then reports progress.
Observer make_observer(const py::object& on_layer, const py::object& on_attention) {
  Observer observer;
  observer.on_layer = [&on_layer](size_t done, size_t total) {
    const py::gil_scoped_acquire acquire;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (!on_layer.is_none()) on_layer(done, total);
  };
  if (!on_attention.is_none()) {
    observer.on_attention = [&on_attention](const AttentionView& view) {
      const py::gil_scoped_acquire acquire;
      on_attention(view.layer, view_rows(view.residual), view_rows(view.q), view_rows(view.k),
                   view_rows(view.v), view_rows(view.attended));
    };
  }
  return observer;
}

Span<const int32_t> view_tokens(const TokenArray& tokens) {
  EH2O_CHECK(tokens.ndim() == 1, "tokens must be one-dimensional, got ", tokens.ndim(), " dimensions");
  return {tokens.data(), static_cast<size_t>(tokens.size())};
}

// Runs steps of sequences that share a workspace; counts what the call allocates.
void run_steps(DecoderWorkspace& shared, Span<const Step> steps, const Observer& observer,
               uint64_t* n_allocations) {
  const py::gil_scoped_release release;
  const uint64_t before = allocation_count();
  shared.decoder->forward(steps, shared.workspace, observer);
  *n_allocations = allocation_count() - before;
}

py::object prefill(DecoderSequence& self, const TokenArray& tokens, bool is_last, bool stays_open,
                   const py::object& on_layer, const py::object& on_attention) {
  const Observer observer = make_observer(on_layer, on_attention);
  self.forget_prompt();
  py::object result = py::none();
  float* logits = nullptr;
  if (is_last) {
    py::array_t<float> row(static_cast<py::ssize_t>(self.vocab_size()));
    logits = row.mutable_data();
    result = row;
  }
  const Step step{&self.sequence, view_tokens(tokens), prompt_end(is_last, stays_open), false, logits};
  run_steps(*self.owner, {&step, 1}, observer, &self.last_call_allocations);
  if (is_last && stays_open) self.prompt_logits = result;
  return result;
}

py::array_t<float> decode(DecoderSequence& self, int32_t token) {
  py::array_t<float> logits(static_cast<py::ssize_t>(self.vocab_size()));
  const Step step{&self.sequence, {&token, 1}, PromptEnd::kFinal, true, logits.mutable_data()};
  run_steps(*self.owner, {&step, 1}, {}, &self.last_call_allocations);
  return logits;
}

// Steps of several sequences in one call: (sequence, tokens, is_last or None for decode).
py::list forward(DecoderWorkspace& shared,
                 const std::vector<std::tuple<DecoderSequence*, TokenArray, std::optional<bool>>>& steps) {
  py::list results;
  std::vector<Step> rows;
  size_t n_rows = 0;
  for (const auto& [sequence, tokens, is_last] : steps) {
    EH2O_CHECK(sequence->owner.get() == &shared, "a sequence belongs to another workspace");
    for (const Step& other : rows) {
      EH2O_CHECK(other.sequence != &sequence->sequence, "a sequence stands twice among the steps");
    }
    const bool has_logits = is_last.value_or(true);
    sequence->forget_prompt();
    py::object result = py::none();
    float* logits = nullptr;
    if (has_logits) {
      py::array_t<float> row(static_cast<py::ssize_t>(sequence->vocab_size()));
      logits = row.mutable_data();
      result = row;
    }
    results.append(result);
    rows.push_back({&sequence->sequence, view_tokens(tokens), prompt_end(has_logits, false),
                    !is_last.has_value(), logits});
    n_rows += rows.back().tokens.size;
  }
  EH2O_CHECK(!rows.empty(), "there are no steps");
  {
    const py::gil_scoped_release release;
    shared.workspace.fit(n_rows, *rows[0].sequence);
  }
  uint64_t n_allocations = 0;
  run_steps(shared, {rows.data(), rows.size()}, {}, &n_allocations);
  return results;
}

py::array_t<float> row_logits(DecoderSequence& self, size_t first, size_t n_rows) {
  const size_t most = self.sequence.shape().batch_size;
  EH2O_CHECK(n_rows <= most, "a prefill call has at most ", most, " rows, asked for ", n_rows);
  py::array_t<float> logits({n_rows, self.vocab_size()});
  float* data = logits.mutable_data();
  const py::gil_scoped_release release;
  self.decoder().row_logits(self.sequence, self.owner->workspace, first, n_rows, data);
  return logits;
}

py::list token_ids(const DecoderSequence& self) {
  py::list ids;
  for (const int32_t token : self.sequence.tokens()) ids.append(token);
  return ids;
}

void load_state(DecoderSequence& self, const py::buffer& state,
                const std::optional<std::vector<int32_t>>& tokens) {
  const py::buffer_info info = state.request();
  self.forget_prompt();
  self.sequence.load_state(contiguous_bytes(info, "the state"));
  if (!tokens) return;
  if (tokens->size() != self.sequence.position()) {
    const size_t position = self.sequence.position();
    self.sequence.reset();
    throw_invalid("it is of ", position, " tokens, not ", tokens->size());
  }
  self.sequence.append_tokens({tokens->data(), tokens->size()});
}

void copy_from(DecoderSequence& self, const DecoderSequence& other, size_t position) {
  EH2O_CHECK(&self.decoder() == &other.decoder(), "the other sequence is of another model");
  self.forget_prompt();
  self.sequence.copy_from(other.sequence, position);
}

}  // namespace

void bind_sequence(py::module_& module) {
  py::class_<DecoderWorkspace, WorkspacePtr>(module, "Workspace")
      .def(py::init<std::shared_ptr<Decoder>, std::optional<int>>(), py::arg("model"),
           py::arg("threads") = py::none())
      .def("forward", &forward, py::arg("steps"))
      .def_property_readonly("threads", [](DecoderWorkspace& self) { return self.workspace.n_threads(); });

  py::class_<DecoderSequence, std::shared_ptr<DecoderSequence>> c(module, "Sequence");
  c.def(py::init([](std::shared_ptr<Decoder> model, PolicyPtr policy, size_t max_context, size_t batch_size,
                    size_t chunk_size, const std::string& cache_type, const std::string& precision,
                    bool all_rows, std::optional<int> threads, WorkspacePtr workspace) {
          const SequenceShape shape =
              make_shape(max_context, batch_size, chunk_size, cache_type, precision, all_rows);
          if (!workspace) workspace = std::make_shared<DecoderWorkspace>(model, threads);
          EH2O_CHECK(workspace->decoder == model, "the workspace is of another model");
          return std::make_shared<DecoderSequence>(std::move(workspace), std::move(policy), shape);
        }),
        py::arg("model"), py::arg("policy"), py::kw_only(), py::arg("max_context"), py::arg("batch_size"),
        py::arg("chunk_size"), py::arg("cache_type") = "f16", py::arg("precision") = "f32",
        py::arg("all_rows") = false, py::arg("threads") = py::none(), py::arg("workspace") = py::none())
      .def("prefill", &prefill, py::arg("tokens"), py::kw_only(), py::arg("is_last"),
           py::arg("stays_open") = false, py::arg("on_layer") = py::none(),
           py::arg("on_attention") = py::none())
      .def("row_logits", &row_logits, py::arg("first"), py::arg("n_rows"))
      .def("decode", &decode, py::arg("token"))
      .def("load_state", &load_state, py::arg("state"), py::arg("token_ids") = py::none())
      .def("copy_from", &copy_from, py::arg("other"), py::arg("position"))
      .def_readwrite("prompt_logits", &DecoderSequence::prompt_logits)
      .def_property_readonly("workspace", [](const DecoderSequence& self) { return self.owner; })
      .def_property_readonly("token_ids", &token_ids)
      .def_property_readonly("position", [](const DecoderSequence& self) { return self.sequence.position(); })
      .def_property_readonly("max_context",
                             [](const DecoderSequence& self) { return self.sequence.shape().max_context; })
      .def_property_readonly("batch_size",
                             [](const DecoderSequence& self) { return self.sequence.shape().batch_size; })
      .def_property_readonly("chunk_size",
                             [](const DecoderSequence& self) { return self.sequence.shape().chunk_size; })
      .def_property_readonly("vocab_size", &DecoderSequence::vocab_size)
      .def_property_readonly(
          "pairs_computed",
          [](const DecoderSequence& self) { return self.sequence.pairs_computed(self.n_attending()); })
      .def_property_readonly(
          "pairs_dense",
          [](const DecoderSequence& self) { return self.sequence.pairs_dense(self.n_attending()); })
      .def_property_readonly("last_call_allocations",
                             [](const DecoderSequence& self) -> std::optional<uint64_t> {
                               if (!kCountsAllocations) return std::nullopt;
                               return self.last_call_allocations;
                             })
      .def_property_readonly("memory_bytes",
                             [](const DecoderSequence& self) {
                               return DecoderSequence::estimate(self.decoder().config(), *self.policy,
                                                                self.sequence.shape(),
                                                                self.owner->workspace.n_threads());
                             })
      .def_static(
          "estimate_bytes",
          [](const DecoderConfig& config, const PolicyPtr& policy, size_t max_context, size_t batch_size,
             size_t chunk_size, const std::string& cache_type, const std::string& precision, bool all_rows,
             std::optional<int> threads) {
            return DecoderSequence::estimate(
                config, *policy,
                make_shape(max_context, batch_size, chunk_size, cache_type, precision, all_rows), threads);
          },
          py::arg("config"), py::arg("policy"), py::kw_only(), py::arg("max_context"), py::arg("batch_size"),
          py::arg("chunk_size"), py::arg("cache_type") = "f16", py::arg("precision") = "f32",
          py::arg("all_rows") = false, py::arg("threads") = py::none());
  bind_sequence_methods<DecoderSequence>(c);
}

}  // namespace edgeh2o
