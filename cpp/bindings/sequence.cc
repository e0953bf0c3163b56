// Prompts in the decoder: what Python's runner protocol asks for (edgeh2o/runners/base.py).
#include "sequence/sequence.h"

#include <pybind11/functional.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <functional>
#include <limits>

#include "base/allocation_counter.h"
#include "base/check.h"
#include "base/parallel.h"
#include "bindings/buffers.h"
#include "bindings/decoder_sequence.h"
#include "bindings/register.h"
#include "bindings/sequence_methods.h"
#include "model/decoder.h"
#include "model/eviction.h"
#include "ops/decode_attention.h"

namespace py = pybind11;

namespace edgeh2o {
namespace {

// What the adapters of a model count in a sequence of it: what is asked for, else as the model has it.
std::vector<float> scales_of(const Decoder& model, std::optional<std::vector<float>> asked) {
  const std::vector<float>& own = model.config().adapter_scales;
  std::vector<float> scales = asked ? std::move(*asked) : own;
  EH2O_CHECK(scales.size() == own.size(), "there are ", scales.size(), " scales for ", own.size(),
             " adapters");
  const auto counts = [](float scale) { return scale != 0.0f; };
  if (std::none_of(scales.begin(), scales.end(), counts)) scales.clear();
  return scales;
}

// Rows as they lie, for as long as the call that gets them: no copy of a prompt's activations.
py::array_t<float> view_rows(const MatView<const float>& rows) {
  py::array_t<float> view({rows.rows, rows.cols}, {rows.stride * sizeof(float), sizeof(float)}, rows.data,
                          py::none());
  view.attr("flags").attr("writeable") = false;
  return view;
}

// For as long as both objects live.
Observer make_observer(const py::object& on_layer, const py::object& on_attention) {
  Observer observer;
  observer.on_layer = layer_reporter(on_layer);
  if (!on_attention.is_none()) {
    observer.on_attention = [&on_attention](const AttentionView& view) {
      const py::gil_scoped_acquire acquire;
      on_attention(view.layer, view_rows(view.residual), view_rows(view.q), view_rows(view.k),
                   view_rows(view.v), view_rows(view.attended));
    };
  }
  return observer;
}

// Runs steps of sequences that share a workspace; counts what the call allocates.
void run_steps(DecoderWorkspace& shared, Span<const Step> steps, const Observer& observer,
               uint64_t* n_allocations) {
  const py::gil_scoped_release release;
  const uint64_t before = allocation_count();
  shared.decoder->forward(steps, shared.workspace, observer);
  *n_allocations = allocation_count() - before;
}

// Hidden rows that stand beside a call's tokens.
using HiddenArray = std::optional<py::array_t<float, py::array::c_style>>;

// The step with its hidden rows, and with memory for those that come out, if they are kept.
void add_hidden(DecoderSequence& self, const HiddenArray& hidden, Step* step) {
  const size_t dim = self.decoder().config().model_dim, n = step->tokens.size;
  if (hidden) step->hidden = view_hidden(*hidden, n, self.decoder().config().hidden_width());
  self.hidden = py::none();
  if (!self.keeps_hidden) return;
  if (!self.hidden_layers.empty()) {
    const size_t n_layers = self.hidden_layers.size();
    py::array_t<float> rows({n, n_layers * dim});
    step->taken_out = rows.mutable_data();
    step->taken = {self.hidden_layers.data(), n_layers};
    self.hidden = rows;
    return;
  }
  size_t n_kept = n;
  if (self.keeps_last_hidden && !step->is_decode) n_kept = step->end == PromptEnd::kLater ? 0 : 1;
  if (n_kept == 0) return;
  py::array_t<float> rows({n_kept, dim});
  step->hidden_out = rows.mutable_data();
  step->n_hidden = n_kept;
  self.hidden = rows;
}

py::object prefill(DecoderSequence& self, const TokenArray& tokens, bool is_last, bool stays_open,
                   const py::object& on_layer, const py::object& on_attention, const HiddenArray& hidden) {
  const Observer observer = make_observer(on_layer, on_attention);
  self.forget_prompt();
  py::object result = py::none();
  float* logits = nullptr;
  if (is_last) {
    py::array_t<float> row(static_cast<py::ssize_t>(self.vocab_size()));
    logits = row.mutable_data();
    result = row;
  }
  Step step{&self.sequence, view_tokens(tokens), prompt_end(is_last, stays_open), false, logits};
  add_hidden(self, hidden, &step);
  run_steps(*self.owner, {&step, 1}, observer, &self.last_call_allocations);
  if (is_last && stays_open) self.prompt_logits = result;
  return result;
}

// Hidden rows [n_rows][model_dim] of the last tokens of a prefill call, which computes no logits.
py::array_t<float> embed(DecoderSequence& self, const TokenArray& tokens, bool is_last, size_t n_rows,
                         const py::object& on_layer) {
  const Observer observer = make_observer(on_layer, py::none());
  self.forget_prompt();
  Step step{&self.sequence, view_tokens(tokens), prompt_end(is_last, false), false, nullptr};
  const size_t n = step.tokens.size;
  EH2O_CHECK(n_rows <= n, "a call of ", n, " tokens has no ", n_rows, " rows");
  py::array_t<float> rows({n_rows, self.decoder().config().model_dim});
  step.hidden_out = rows.mutable_data();
  step.n_hidden = n_rows;
  run_steps(*self.owner, {&step, 1}, observer, &self.last_call_allocations);
  return rows;
}

py::array_t<float> decode(DecoderSequence& self, int32_t token, const HiddenArray& hidden) {
  py::array_t<float> logits(static_cast<py::ssize_t>(self.vocab_size()));
  Step step{&self.sequence, {&token, 1}, PromptEnd::kFinal, true, logits.mutable_data()};
  add_hidden(self, hidden, &step);
  run_steps(*self.owner, {&step, 1}, {}, &self.last_call_allocations);
  return logits;
}

// Logits [n][vocab_size] after every token; all but the first token are left ahead of the sequence.
py::array_t<float> decode_batch(DecoderSequence& self, const TokenArray& tokens, const HiddenArray& hidden) {
  const Span<const int32_t> view = view_tokens(tokens);
  EH2O_CHECK(view.size <= self.max_decode_tokens(), "a decode call takes 1 to ", self.max_decode_tokens(),
             " tokens, got ", view.size);
  py::array_t<float> logits({view.size, self.vocab_size()});
  Step step{&self.sequence, view, PromptEnd::kFinal, true, logits.mutable_data()};
  add_hidden(self, hidden, &step);
  run_steps(*self.owner, {&step, 1}, {}, &self.last_call_allocations);
  return logits;
}

// Steps of several sequences in one call: (sequence, tokens, is_last or None for decode). A decode step has
// logits [n][vocab_size] after every token; all but its first token are left ahead of the sequence.
py::list forward(DecoderWorkspace& shared,
                 const std::vector<std::tuple<DecoderSequence*, TokenArray, std::optional<bool>>>& steps) {
  EH2O_CHECK(!steps.empty(), "there are no steps");
  size_t n_rows = 0, n_decoded = 0;
  for (const auto& [sequence, tokens, is_last] : steps) {
    EH2O_CHECK(sequence->owner.get() == &shared, "a sequence belongs to another workspace");
    const size_t n = view_tokens(tokens).size, most = sequence->max_decode_tokens();
    EH2O_CHECK(is_last || n <= most, "a decode call takes 1 to ", most, " tokens, got ", n);
    n_rows += n;
    if (!is_last) n_decoded += n;
  }
  // The logits of decode steps are rows of one matrix, so that the steps can go together.
  const size_t vocab_size = std::get<0>(steps[0])->vocab_size();
  py::array_t<float> matrix({n_decoded, vocab_size});
  py::list results;
  std::vector<Step> rows;
  size_t first_row = 0;
  for (const auto& [sequence, tokens, is_last] : steps) {
    for (const Step& other : rows) {
      EH2O_CHECK(other.sequence != &sequence->sequence, "a sequence stands twice among the steps");
    }
    const Span<const int32_t> view = view_tokens(tokens);
    const bool has_logits = is_last.value_or(true);
    py::object result = py::none();
    float* logits = nullptr;
    if (!is_last) {
      sequence->prompt_logits = py::none();
      if (view.size > 0) logits = matrix.mutable_data(static_cast<py::ssize_t>(first_row), 0);
      result = matrix[py::slice(static_cast<py::ssize_t>(first_row),
                                static_cast<py::ssize_t>(first_row + view.size), 1)];
      first_row += view.size;
    } else {
      sequence->forget_prompt();
      if (has_logits) {
        py::array_t<float> row(static_cast<py::ssize_t>(vocab_size));
        logits = row.mutable_data();
        result = row;
      }
    }
    results.append(result);
    rows.push_back({&sequence->sequence, view, prompt_end(has_logits, false), !is_last, logits});
    if (!is_last) add_hidden(*sequence, std::nullopt, &rows.back());
  }
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

// Ascending, each once.
void set_hidden_layers(DecoderSequence& self, std::vector<size_t> layers) {
  const DecoderConfig& config = self.decoder().config();
  EH2O_CHECK(std::adjacent_find(layers.begin(), layers.end(), std::greater_equal<>()) == layers.end() &&
                 (layers.empty() || layers.back() < config.n_layers()),
             "the rows that are kept are of different layers of ", config.n_layers(), ", in their order");
  EH2O_CHECK(layers.empty() || (!config.has_streams && !config.mixes_streams() && config.passes.empty()),
             "layers of this model have no rows of one residual stream to keep");
  self.hidden_layers = std::move(layers);
}

// Rows [n][model_dim] that stand beside tokens, of those of another model.
py::array_t<float> encode_rows(DecoderSequence& self,
                               const py::array_t<float, py::array::c_style>& features) {
  const DecoderConfig& config = self.decoder().config();
  const auto n = static_cast<size_t>(features.ndim() == 2 ? features.shape(0) : 0);
  const float* data = view_hidden(features, n, config.features_dim);
  py::array_t<float> out({n, config.model_dim});
  float* rows = out.mutable_data();
  const py::gil_scoped_release release;
  self.decoder().encode({data, n, config.features_dim, config.features_dim}, self.owner->workspace,
                        {rows, n, config.model_dim, config.model_dim});
  return out;
}

void let_evict(DecoderSequence& self, bool is_allowed) {
  allow_eviction(self.decoder().config(), self.sequence, is_allowed);
  const py::gil_scoped_release release;  // a call at work may want it
  self.owner->workspace.fit(self.sequence.shape().batch_size, self.sequence);
}

void read_rest(DecoderSequence& self, const std::string& precision, bool reads_all) {
  self.sequence.read_rest(parse_attention_precision(precision), reads_all);
  const py::gil_scoped_release release;
  self.owner->workspace.fit(self.sequence.shape().batch_size, self.sequence);
}

void evict_tokens(DecoderSequence& self, size_t n) {
  self.forget_prompt();
  const py::gil_scoped_release release;
  const ThreadScope threads(self.owner->workspace.n_threads());
  evict(self.decoder().config(), self.sequence, n);
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
      .def_property_readonly("written_bytes",
                             [](DecoderWorkspace& self) { return self.workspace.written_bytes(); })
      .def_property_readonly("threads", [](DecoderWorkspace& self) { return self.workspace.n_threads(); });

  py::class_<DecoderSequence, std::shared_ptr<DecoderSequence>> c(module, "Sequence");
  c.def(py::init([](std::shared_ptr<Decoder> model, PolicyPtr policy, size_t max_context, size_t batch_size,
                    size_t chunk_size, const std::string& cache_type, const std::string& precision,
                    bool all_rows, size_t checked_rows, double error_limit, std::optional<int> threads,
                    WorkspacePtr workspace, std::optional<std::vector<float>> adapter_scales) {
          SequenceShape shape = make_shape(max_context, batch_size, chunk_size, cache_type, precision,
                                           all_rows, {checked_rows, error_limit});
          if (!workspace) workspace = std::make_shared<DecoderWorkspace>(model, threads);
          EH2O_CHECK(workspace->decoder == model, "the workspace is of another model");
          shape.adapter_scales = scales_of(*model, std::move(adapter_scales));
          return std::make_shared<DecoderSequence>(std::move(workspace), std::move(policy), shape);
        }),
        py::arg("model"), py::arg("policy"), py::kw_only(), py::arg("max_context"), py::arg("batch_size"),
        py::arg("chunk_size"), py::arg("cache_type") = "f16", py::arg("precision") = "f32",
        py::arg("all_rows") = false, py::arg("checked_rows") = 0,
        py::arg("error_limit") = std::numeric_limits<double>::infinity(), py::arg("threads") = py::none(),
        py::arg("workspace") = py::none(), py::arg("adapter_scales") = py::none(),
        py::keep_alive<1, 13>())  // the object of `workspace`, by which others find it
      .def("prefill", &prefill, py::arg("tokens"), py::kw_only(), py::arg("is_last"),
           py::arg("stays_open") = false, py::arg("on_layer") = py::none(),
           py::arg("on_attention") = py::none(), py::arg("hidden") = py::none())
      .def_readwrite("keeps_hidden", &DecoderSequence::keeps_hidden)
      .def_readonly("hidden", &DecoderSequence::hidden)
      .def_readwrite("keeps_last_hidden", &DecoderSequence::keeps_last_hidden)
      .def_property(
          "hidden_layers", [](const DecoderSequence& self) { return self.hidden_layers; }, &set_hidden_layers)
      .def("encode", &encode_rows, py::arg("features"))
      .def("row_logits", &row_logits, py::arg("first"), py::arg("n_rows"))
      .def("embed", &embed, py::arg("tokens"), py::kw_only(), py::arg("is_last"), py::arg("n_rows"),
           py::arg("on_layer") = py::none())
      .def("decode", &decode, py::arg("token"), py::arg("hidden") = py::none())
      .def("decode_batch", &decode_batch, py::arg("tokens"), py::arg("hidden") = py::none())
      .def(
          "accept", [](DecoderSequence& self, size_t n) { self.sequence.accept(n); }, py::arg("n"))
      .def_property_readonly("max_decode_tokens", &DecoderSequence::max_decode_tokens)
      .def(
          "note_reads", [](DecoderSequence& self, bool is_wanted) { self.sequence.note_reads(is_wanted); },
          py::arg("is_wanted"))
      .def_property_readonly(
          "reads",
          [](const DecoderSequence& self) {
            py::list all;
            for (const std::vector<int32_t>& one : self.sequence.reads()) {
              all.append(py::array_t<int32_t>(static_cast<py::ssize_t>(one.size()), one.data()));
            }
            return all;
          })
      .def("allow_eviction", &let_evict, py::arg("is_allowed"))
      .def("read_rest", &read_rest, py::arg("precision"), py::kw_only(), py::arg("reads_all"))
      .def("evict", &evict_tokens, py::arg("n"))
      .def("use_small_pages", [](DecoderSequence& self) { self.sequence.use_small_pages(); })
      .def_property_readonly("mark_bytes",
                             [](const DecoderSequence& self) { return self.sequence.mark_bytes(); })
      .def_property_readonly("resident_bytes",
                             [](const DecoderSequence& self) -> std::optional<size_t> {
                               if (!tells_resident_pages()) return std::nullopt;
                               return self.sequence.resident_bytes();
                             })
      .def("copy_from", &copy_from, py::arg("other"), py::arg("position"))
      .def_property_readonly("workspace", [](const DecoderSequence& self) { return self.owner; })
      .def_property_readonly("last_call_allocations",
                             [](const DecoderSequence& self) -> std::optional<uint64_t> {
                               if (!kCountsAllocations) return std::nullopt;
                               return self.last_call_allocations;
                             })
      .def_static(
          "estimate_bytes",
          [](const DecoderConfig& config, const PolicyPtr& policy, size_t max_context, size_t batch_size,
             size_t chunk_size, const std::string& cache_type, const std::string& precision, bool all_rows,
             size_t checked_rows, double error_limit, std::optional<int> threads) {
            return DecoderSequence::estimate(config, *policy,
                                             make_shape(max_context, batch_size, chunk_size, cache_type,
                                                        precision, all_rows, {checked_rows, error_limit}),
                                             threads);
          },
          py::arg("config"), py::arg("policy"), py::kw_only(), py::arg("max_context"), py::arg("batch_size"),
          py::arg("chunk_size"), py::arg("cache_type") = "f16", py::arg("precision") = "f32",
          py::arg("all_rows") = false, py::arg("checked_rows") = 0,
          py::arg("error_limit") = std::numeric_limits<double>::infinity(), py::arg("threads") = py::none());
  c.def_static(
      "check_eviction",
      [](const DecoderConfig& config, const PolicyPtr& policy, size_t max_context, size_t batch_size,
         size_t chunk_size, const std::string& cache_type) {
        check_eviction(config, *policy,
                       make_shape(max_context, batch_size, chunk_size, cache_type, "f32", false, {}));
      },
      py::arg("config"), py::arg("policy"), py::kw_only(), py::arg("max_context"), py::arg("batch_size"),
      py::arg("chunk_size"), py::arg("cache_type") = "f16");
  bind_prompt_methods<DecoderSequence>(c);
}

}  // namespace edgeh2o
