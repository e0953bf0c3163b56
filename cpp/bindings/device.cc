// GPUs, and prompts in decoders that live there: what Python's runner protocol asks for.
#include "cuda/device.h"

#include <pybind11/functional.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <limits>

#include "base/check.h"
#include "bindings/buffers.h"
#include "bindings/register.h"
#include "bindings/sequence_methods.h"
#include "cuda/device_decoder.h"
#include "cuda/self_test.h"
#include "isa/select.h"
#include "model/mixers/attention.h"

namespace py = pybind11;

namespace edgeh2o {
namespace {

using cuda::Device;
using cuda::DeviceDecoder;
using cuda::DeviceState;

py::dict to_dict(const cuda::DeviceProperties& p) {
  py::dict result;
  result["name"] = p.name;
  result["driver_version"] = p.driver_version;
  result["compute_capability"] = py::make_tuple(p.major, p.minor);
  result["n_processors"] = p.n_processors;
  result["clock_hz"] = p.clock_hz;
  result["is_integrated"] = p.is_integrated;
  result["total_bytes"] = p.total_bytes;
  result["free_bytes"] = p.free_bytes;
  return result;
}

SequenceShape device_shape(size_t max_context, size_t batch_size, size_t chunk_size,
                           const std::string& cache_type, bool all_rows, const ErrorGuard& guard) {
  SequenceShape shape = make_shape(max_context, batch_size, chunk_size, cache_type, "f32", all_rows, guard);
  shape.looks_ahead = false;
  return shape;
}

void check_supported(const PolicyNeeds& needs) {
  EH2O_CHECK(!needs.ends_prompts,
             "rules by which generated tokens read a part of the prompt (--attention quest ",
             "and rocketkv, --decode-attention) do not run on a GPU yet; use --device cpu");
}

struct DeviceSequence {
  DeviceSequence(std::shared_ptr<DeviceDecoder> model, std::shared_ptr<SparsePolicy> rule,
                 const SequenceShape& shape)
      : decoder(std::move(model)),
        policy(rule),
        sequence(active_kernel_table(), decoder->config().keeps(), rule, shape),
        state(decoder->device(), decoder->config(), shape, sequence.plan(0).needs) {
    check_supported(sequence.plan(0).needs);
  }

  void forget_prompt() { prompt_logits = py::none(); }
  size_t vocab_size() const { return decoder->config().vocab_size; }
  size_t n_attending() const { return n_attending_layers(decoder->config(), sequence); }
  py::dict memory_bytes() const { return estimate(decoder->config(), *policy, sequence.shape()); }

  void fetch_rows() {
    if (rows_are_on_host) return;
    const py::gil_scoped_release release;
    const std::lock_guard<std::mutex> lock(decoder->mutex());
    state.download_rows(sequence);
  }
  void fetch_states() {
    if (!sequence.is_recurrent()) return;
    const py::gil_scoped_release release;
    const std::lock_guard<std::mutex> lock(decoder->mutex());
    state.download_states(sequence);
  }
  void expect_rows() { rows_are_on_host = true; }

  py::array_t<float> run(Span<const int32_t> tokens, bool is_decode, PromptEnd end,
                         const cuda::OnLayer& on_layer) {
    const bool has_logits = end != PromptEnd::kLater;
    py::array_t<float> logits(has_logits ? static_cast<py::ssize_t>(vocab_size()) : 0);
    float* const out = has_logits ? logits.mutable_data() : nullptr;
    const py::gil_scoped_release release;
    if (rows_are_on_host) {
      const std::lock_guard<std::mutex> lock(decoder->mutex());  // another session may be at work
      state.upload_rows(sequence);
      rows_are_on_host = false;
    }
    n_left = 0;
    decoder->forward(sequence, state, tokens, is_decode, end, out, on_layer);
    if (!is_decode) n_left = tokens.size;
    return logits;
  }

  static py::dict estimate(const DecoderConfig& config, const SparsePolicy& policy,
                           const SequenceShape& shape) {
    const SequenceBytes host =
        Sequence::estimate_bytes(active_kernel_table(), config.keeps(), policy, shape, 1);
    const PolicyNeeds needs = policy.needs(Sequence::policy_shape(config.keeps(), shape, false));
    check_supported(needs);
    py::dict result;
    result["kv_cache"] = DeviceState::cache_bytes(config, shape);
    const DeviceState::BufferBytes buffers = DeviceState::buffer_bytes(config, shape, needs);
    if (host.recurrent > 0) {
      result["recurrent_state"] = DeviceState::recurrent_bytes(config);
      result["recurrent_copy"] = host.recurrent;
    }
    result["activations"] = buffers.device;
    result["staging"] = buffers.pinned;
    result["scores"] = host.policy;
    if (needs.looks_at_past) result["rows_for_the_rule"] = host.kv_cache;
    return result;
  }

  std::shared_ptr<DeviceDecoder> decoder;
  std::shared_ptr<SparsePolicy> policy;
  Sequence sequence;  // its books; the rows of its cache are a copy of the device's, when one was asked for
  DeviceState state;
  py::object prompt_logits = py::none();
  bool rows_are_on_host = false;  // a saved prompt was taken up: they go to the device before the next call
  size_t n_left = 0;
};

py::object prefill_on_device(DeviceSequence& self, const TokenArray& tokens, bool is_last, bool stays_open,
                             const py::object& on_layer, const py::object& on_attention) {
  EH2O_CHECK(on_attention.is_none(),
             "the attention of a model on a GPU cannot be looked at; use --device cpu");
  self.forget_prompt();
  const py::array_t<float> logits =
      self.run(view_tokens(tokens), false, prompt_end(is_last, stays_open), layer_reporter(on_layer));
  if (!is_last) return py::none();
  if (stays_open) self.prompt_logits = logits;
  return logits;
}

py::array_t<float> device_row_logits(DeviceSequence& self, size_t first, size_t n_rows) {
  EH2O_CHECK(n_rows > 0 && first <= self.n_left && n_rows <= self.n_left - first, "rows ", first, " to ",
             first, " + ", n_rows, " are not among the ", self.n_left, " of the latest prefill call");
  py::array_t<float> logits({n_rows, self.vocab_size()});
  float* const data = logits.mutable_data();
  const py::gil_scoped_release release;
  self.decoder->row_logits(self.state, first, n_rows, data);
  return logits;
}

}  // namespace

void bind_device(py::module_& module) {
  py::register_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const cuda::DeviceError& device_error) {
      const py::object type = py::module_::import("edgeh2o.errors").attr("ResourceError");
      PyErr_SetString(type.ptr(), device_error.what());
    }
  });
  module.def("device_count", &Device::count);
  py::class_<Device, std::shared_ptr<Device>>(module, "Device")
      .def(py::init<int>(), py::arg("ordinal"))
      .def("self_test", [](Device& device) { return cuda::run_self_test(device); })
      .def("properties", [](const Device& device) { return to_dict(device.properties()); })
      .def(
          "load_image", [](Device& device, const py::bytes& image) { device.load_image(std::string(image)); },
          py::arg("image"));
  py::class_<DeviceDecoder, std::shared_ptr<DeviceDecoder>>(module, "DeviceModel")
      .def(py::init([](const DecoderConfig& config, std::shared_ptr<Device> device, size_t block_bytes) {
             return std::make_shared<DeviceDecoder>(config, active_kernel_table(), std::move(device),
                                                    block_bytes);
           }),
           py::arg("config"), py::arg("device"), py::arg("block_bytes") = cuda::DevicePool::kBlockBytes)
      .def_static("estimate_bytes", &cuda::DeviceWeights::estimate_bytes, py::arg("type"), py::arg("rows"),
                  py::arg("cols"))
      .def(
          "expect_bytes", [](DeviceDecoder& self, size_t n_bytes) { self.weights().expect(n_bytes); },
          py::arg("n_bytes"))
      .def("finish", [](DeviceDecoder& self) { self.weights().finish(); })
      .def_property_readonly("weight_bytes", [](DeviceDecoder& self) { return self.weights().n_bytes(); });
  module.def(
      "check_device_supports", [](const DecoderConfig& config) { cuda::check_supported(config); },
      py::arg("config"));

  py::class_<DeviceSequence, std::shared_ptr<DeviceSequence>> c(module, "DeviceSequence");
  c.def(py::init([](std::shared_ptr<DeviceDecoder> model, std::shared_ptr<SparsePolicy> policy,
                    size_t max_context, size_t batch_size, size_t chunk_size, const std::string& cache_type,
                    bool all_rows, size_t checked_rows, double error_limit) {
          const SequenceShape shape = device_shape(max_context, batch_size, chunk_size, cache_type, all_rows,
                                                   {checked_rows, error_limit});
          return std::make_shared<DeviceSequence>(std::move(model), std::move(policy), shape);
        }),
        py::arg("model"), py::arg("policy"), py::kw_only(), py::arg("max_context"), py::arg("batch_size"),
        py::arg("chunk_size"), py::arg("cache_type") = "f16", py::arg("all_rows") = false,
        py::arg("checked_rows") = 0, py::arg("error_limit") = std::numeric_limits<double>::infinity())
      .def("prefill", &prefill_on_device, py::arg("tokens"), py::kw_only(), py::arg("is_last"),
           py::arg("stays_open") = false, py::arg("on_layer") = py::none(),
           py::arg("on_attention") = py::none())
      .def("row_logits", &device_row_logits, py::arg("first"), py::arg("n_rows"))
      .def(
          "decode",
          [](DeviceSequence& self, int32_t token) {
            return self.run({&token, 1}, true, PromptEnd::kFinal, {});
          },
          py::arg("token"))
      // One: products of several rows take other kernels, with sums of another order.
      .def_property_readonly("max_decode_tokens", [](const DeviceSequence&) { return 1; })
      .def_static(
          "estimate_bytes",
          [](const DecoderConfig& config, const std::shared_ptr<SparsePolicy>& policy, size_t max_context,
             size_t batch_size, size_t chunk_size, const std::string& cache_type, bool all_rows,
             size_t checked_rows, double error_limit) {
            return DeviceSequence::estimate(config, *policy,
                                            device_shape(max_context, batch_size, chunk_size, cache_type,
                                                         all_rows, {checked_rows, error_limit}));
          },
          py::arg("config"), py::arg("policy"), py::kw_only(), py::arg("max_context"), py::arg("batch_size"),
          py::arg("chunk_size"), py::arg("cache_type") = "f16", py::arg("all_rows") = false,
          py::arg("checked_rows") = 0, py::arg("error_limit") = std::numeric_limits<double>::infinity());
  bind_prompt_methods<DeviceSequence>(c);
}

}  // namespace edgeh2o
