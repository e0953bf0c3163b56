// What drafts for a model by the keys and values of the model's own sequences.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/decoder_sequence.h"
#include "bindings/register.h"
#include "model/lent_rows.h"

namespace py = pybind11;

namespace edgeh2o {
namespace {

// A decoder that attends to the sequences of the model that it drafts for.
struct LentReader {
  LentReader(std::shared_ptr<const Decoder> model, std::optional<int> n_threads)
      : shared(std::move(model), n_threads) {
    EH2O_CHECK(shared.decoder->config().reads_lent() && shared.decoder->main(),
               "this model reads no keys and values of another");
    shared.decoder->weights().check_complete();
    fit(1);
  }

  void fit(size_t max_context) {
    const Decoder& decoder = *shared.decoder;
    if (lent && lent->max_context() == max_context) return;
    lent.emplace(decoder.weights().table(), decoder.config(), decoder.main()->config(), max_context);
    shared.workspace.fit_scratch(1, lent->scratch_bytes(static_cast<size_t>(shared.workspace.n_threads())));
  }

  DecoderWorkspace shared;
  std::optional<LentRows> lent;
};

// Logits [n_outputs] behind a token, and the hidden row [1][hidden_width] of the next guess.
py::tuple guess_next(LentReader& self, DecoderSequence& target, int32_t token,
                     const py::array_t<float, py::array::c_style>& hidden) {
  const Decoder& decoder = *self.shared.decoder;
  EH2O_CHECK(&target.decoder() == decoder.main(), "the sequence is of another model than what drafts for it");
  const size_t width = decoder.config().hidden_width();
  const float* row = view_hidden(hidden, 1, width);
  py::array_t<float> logits(static_cast<py::ssize_t>(decoder.config().n_outputs()));
  py::array_t<float> next({size_t{1}, width});
  float *logits_out = logits.mutable_data(), *next_out = next.mutable_data();
  {
    const py::gil_scoped_release release;
    self.fit(target.sequence.shape().max_context);
    decoder.guess({&target.sequence, &*self.lent, token, row, logits_out, next_out}, self.shared.workspace);
  }
  return py::make_tuple(logits, next);
}

}  // namespace

void bind_drafting(py::module_& module) {
  py::class_<LentReader>(module, "LentReader")
      .def(py::init<std::shared_ptr<Decoder>, std::optional<int>>(), py::arg("model"),
           py::arg("threads") = py::none())
      .def("guess", &guess_next, py::arg("target"), py::arg("token"), py::arg("hidden"))
      .def_static(
          "estimate_bytes",
          [](const DecoderConfig& config, const DecoderConfig& main, size_t max_context,
             std::optional<int> n_threads) {
            const KernelTable& table = active_kernel_table();
            const auto threads = static_cast<size_t>(n_threads.value_or(num_threads()));
            return LentRows(table, config, main, max_context).scratch_bytes(threads) +
                   Workspace::estimate_bytes(config, table, 1, max_context, threads);
          },
          py::arg("config"), py::arg("main"), py::arg("max_context"), py::arg("threads") = py::none());
}

}  // namespace edgeh2o
