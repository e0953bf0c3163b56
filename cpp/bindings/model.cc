#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <map>

#include "base/check.h"
#include "bindings/buffers.h"
#include "bindings/register.h"
#include "cuda/device_decoder.h"
#include "isa/select.h"
#include "model/decoder.h"
#include "model/weight_reader.h"
#include "quant/convert_rows.h"
#include "quant/tensor_check.h"
#include "quant/widened_types.h"

namespace py = pybind11;

namespace edgeh2o {
namespace {

// Takes the fields of a configuration from keyword arguments; those that are left out keep their defaults.
class FieldReader {
 public:
  explicit FieldReader(const py::dict& fields)
      : fields_(py::reinterpret_steal<py::dict>(PyDict_Copy(fields.ptr()))) {}

  template <typename T>
  void read(const char* name, T& field) {
    if (fields_.contains(name)) field = py::cast<T>(fields_.attr("pop")(name));
  }

  template <typename T>
  void read_choice(const char* name, T& field, std::initializer_list<std::pair<const char*, T>> choices) {
    std::string value, known;
    read(name, value);
    if (value.empty()) return;
    for (const auto& [choice, meaning] : choices) {
      if (value == choice) {
        field = meaning;
        return;
      }
      known += (known.empty() ? "" : ", ") + std::string(choice);
    }
    throw_invalid(name, " '", value, "' is not supported; supported: ", known);
  }

  void finish() const {
    for (const auto& item : fields_)
      throw py::type_error("unknown field " + py::cast<std::string>(item.first));
  }

 private:
  py::dict fields_;
};

RopeConfig make_rope(const py::dict& fields) {
  RopeConfig rope;
  FieldReader reader(fields);
  reader.read("inv_freq", rope.inv_freq);
  reader.read("attention_factor", rope.attention_factor);
  reader.read("long_inv_freq", rope.long_inv_freq);
  reader.read("long_after", rope.long_after);
  reader.finish();
  return rope;
}

LayerSpec make_layer(const py::dict& fields) {
  LayerSpec layer;
  FieldReader reader(fields);
  reader.read_choice("mixer", layer.mixer,
                     {{"attention", MixerKind::kAttention},
                      {"short_conv", MixerKind::kShortConv},
                      {"delta_net", MixerKind::kDeltaNet},
                      {"mamba2", MixerKind::kMamba2},
                      {"attention_mamba2", MixerKind::kAttentionMamba2},
                      {"mamba1", MixerKind::kMamba1},
                      {"rwkv7", MixerKind::kRwkv7},
                      {"none", MixerKind::kNone}});
  reader.read("n_heads", layer.heads.n_heads);
  reader.read("n_kv_heads", layer.heads.n_kv_heads);
  reader.read("key_dim", layer.heads.key_dim);
  reader.read("value_dim", layer.heads.value_dim);
  reader.read("attention_scale", layer.heads.scale);
  reader.read("attention_soft_cap", layer.heads.soft_cap);
  reader.read("kv_distance", layer.heads.kv_distance);
  reader.read("values_are_keys", layer.heads.values_are_keys);
  reader.read("latent_rank", layer.latent.rank);
  reader.read("latent_q_rank", layer.latent.q_rank);
  reader.read("latent_nope_dim", layer.latent.nope_dim);
  reader.read("latent_rope_dim", layer.latent.rope_dim);
  reader.read("latent_value_dim", layer.latent.value_dim);
  reader.read("index_heads", layer.heads.index.n_heads);
  reader.read("index_key_dim", layer.heads.index.key_dim);
  reader.read("index_top_k", layer.heads.index.top_k);
  reader.read("window", layer.window);
  reader.read("is_chunked", layer.is_chunked);
  reader.read("rope", layer.rope);
  reader.read_choice("qk_norm", layer.qk_norm,
                     {{"none", QkNorm::kNone}, {"head", QkNorm::kHead}, {"projection", QkNorm::kProjection}});
  reader.read("qk_norm_after_rope", layer.qk_norm_after_rope);
  reader.read("has_plain_qk_norm", layer.has_plain_qk_norm);
  reader.read("has_sinks", layer.has_sinks);
  reader.read("norms_values", layer.norms_values);
  reader.read("has_head_gains", layer.has_head_gains);
  reader.read("has_large_keys", layer.heads.has_large_keys);
  reader.read("temperature_scale", layer.temperature_scale);
  reader.read("temperature_offset", layer.temperature_offset);
  reader.read("temperature_period", layer.temperature_period);
  reader.read_choice("output_gate", layer.output_gate,
                     {{"none", OutputGate::kNone},
                      {"of_queries", OutputGate::kOfQueries},
                      {"per_output", OutputGate::kPerOutput},
                      {"per_head", OutputGate::kPerHead}});
  reader.read_choice("head_gate", layer.head_gate,
                     {{"sigmoid", HeadGate::kSigmoid}, {"softplus", HeadGate::kSoftplus}});
  reader.read("n_conv_taps", layer.n_conv_taps);
  reader.read("n_delta_key_heads", layer.delta.n_key_heads);
  reader.read("n_delta_value_heads", layer.delta.n_value_heads);
  reader.read("delta_head_dim", layer.delta.head_dim);
  reader.read("has_grouped_delta_heads", layer.delta.are_grouped);
  reader.read("has_row_decays", layer.delta.decays_by_row);
  reader.read("delta_log_floor", layer.delta.log_floor);
  reader.read("delta_gate_rank", layer.delta.gate_rank);
  reader.read("n_ssd_heads", layer.ssd.n_heads);
  reader.read("ssd_head_dim", layer.ssd.head_dim);
  reader.read("n_ssd_groups", layer.ssd.n_groups);
  reader.read("ssd_state_dim", layer.ssd.state_dim);
  reader.read("n_wkv_heads", layer.wkv.n_heads);
  reader.read("wkv_head_dim", layer.wkv.head_dim);
  reader.read("wkv_decay_rank", layer.wkv.decay_rank);
  reader.read("wkv_rate_rank", layer.wkv.rate_rank);
  reader.read("wkv_value_rank", layer.wkv.value_rank);
  reader.read("wkv_gate_rank", layer.wkv.gate_rank);
  reader.read("n_scan_channels", layer.scan.n_channels);
  reader.read("scan_state_dim", layer.scan.state_dim);
  reader.read("scan_step_rank", layer.scan.step_rank);
  reader.read_choice(
      "scan_norms", layer.scan.norms,
      {{"none", ScanNorms::kNone}, {"plain", ScanNorms::kPlain}, {"weighted", ScanNorms::kWeighted}});
  reader.read_choice("ffn", layer.ffn,
                     {{"gated", FfnKind::kGated},
                      {"experts", FfnKind::kExperts},
                      {"shifted", FfnKind::kShifted},
                      {"none", FfnKind::kNone}});
  reader.read_choice("activation", layer.activation,
                     {{"silu", Activation::kSilu},
                      {"gelu_tanh", Activation::kGeluTanh},
                      {"silu_clamped", Activation::kSiluClamped},
                      {"relu", Activation::kRelu},
                      {"relu_squared", Activation::kReluSquared},
                      {"ungated_gelu", Activation::kUngatedGelu},
                      {"xielu", Activation::kXielu}});
  reader.read("xielu_positive", layer.xielu.positive);
  reader.read("xielu_negative", layer.xielu.negative);
  reader.read("xielu_beta", layer.xielu.beta);
  reader.read("xielu_eps", layer.xielu.eps);
  reader.read("is_parallel", layer.is_parallel);
  reader.read("has_parallel_norm", layer.has_parallel_norm);
  reader.read("qkv_limit", layer.qkv_limit);
  reader.read("has_joint_bias", layer.has_joint_bias);
  reader.read("has_sub_norms", layer.has_sub_norms);
  reader.read("gate_cutoff", layer.gate_cutoff);
  reader.read("gate_limit", layer.gate_limit);
  reader.read("ffn_dim", layer.ffn_dim);
  reader.read("n_experts", layer.n_experts);
  reader.read("n_experts_used", layer.n_experts_used);
  reader.read("normalises_experts", layer.normalises_experts);
  reader.read("expert_scale", layer.expert_scale);
  reader.read("n_expert_groups", layer.n_expert_groups);
  reader.read("n_expert_groups_used", layer.n_expert_groups_used);
  reader.read_choice("expert_gate", layer.expert_gate,
                     {{"softmax", ExpertGate::kSoftmax}, {"sigmoid", ExpertGate::kSigmoid}});
  reader.read("has_expert_bias", layer.has_expert_bias);
  reader.read("routes_by_input", layer.routes_by_input);
  reader.read("scales_expert_inputs", layer.scales_expert_inputs);
  reader.read("shared_ffn_dim", layer.shared_ffn_dim);
  reader.read("has_shared_gate", layer.has_shared_gate);
  reader.read("experts_scale", layer.experts_scale);
  reader.read("has_expert_norms", layer.has_expert_norms);
  reader.read_choice(
      "norm_placement", layer.norm_placement,
      {{"pre", NormPlacement::kPre}, {"post", NormPlacement::kPost}, {"both", NormPlacement::kBoth}});
  reader.read("residual_scale", layer.residual_scale);
  reader.read("laurel_rank", layer.laurel_rank);
  reader.read("token_input_dim", layer.token_input_dim);
  reader.read("has_output_scale", layer.has_output_scale);
  reader.finish();
  return layer;
}

// The layers of all passes, of those of all stacks.
std::vector<LayerSpec> layers_of_passes(const std::vector<LayerSpec>& own,
                                        const std::vector<size_t>& passes) {
  const size_t last = *std::max_element(passes.begin(), passes.end());
  EH2O_CHECK(last < own.size() && own.size() % (last + 1) == 0, own.size(), " layers in ", last + 1,
             " stacks");
  const size_t n = own.size() / (last + 1);
  std::vector<LayerSpec> layers;
  for (const size_t stack : passes) {
    layers.insert(layers.end(), own.begin() + stack * n, own.begin() + (stack + 1) * n);
  }
  return layers;
}

DecoderConfig make_config(const py::kwargs& fields) {
  DecoderConfig config;
  FieldReader reader(fields);
  reader.read("model_dim", config.model_dim);
  reader.read("vocab_size", config.vocab_size);
  reader.read("norm_eps", config.norm_eps);
  reader.read("post_norm_eps", config.post_norm_eps);
  reader.read("centres_norms", config.centres_norms);
  reader.read("has_norm_weights", config.has_norm_weights);
  reader.read("has_norm_biases", config.has_norm_biases);
  std::vector<py::dict> ropes, layers;
  reader.read("ropes", ropes);
  reader.read("layers", layers);
  for (const py::dict& rope : ropes) config.ropes.push_back(make_rope(rope));
  for (const py::dict& layer : layers) config.layers.push_back(make_layer(layer));
  reader.read("passes", config.passes);
  reader.read("norms_passes", config.norms_passes);
  reader.read("has_two_states", config.has_two_states);
  if (!config.passes.empty()) config.layers = layers_of_passes(config.layers, config.passes);
  reader.read("embedding_scale", config.embedding_scale);
  reader.read("norms_embeddings", config.norms_embeddings);
  reader.read("has_embedding_norm", config.has_embedding_norm);
  reader.read("logit_scale", config.logit_scale);
  reader.read("logit_soft_cap", config.logit_soft_cap);
  reader.read("tied_embeddings", config.tied_embeddings);
  reader.read("has_output_bias", config.has_output_bias);
  reader.read("has_streams", config.has_streams);
  reader.read("n_positions", config.n_positions);
  reader.read("update_rank", config.update_rank);
  reader.read("adapter_scales", config.adapter_scales);
  reader.read("token_input_rows", config.token_input_rows);
  reader.read("reads_hidden", config.reads_hidden);
  reader.read("n_guessed", config.n_guessed);
  reader.finish();
  config.check();
  return config;
}

// The order of rows that a buffer of int32 holds. Buffers, because an array would import NumPy.
class RowOrder {
 public:
  RowOrder(const std::optional<py::buffer>& row_order, const std::string& name, size_t rows, size_t cols) {
    if (!row_order) return;
    info_ = row_order->request();
    EH2O_CHECK(
        info_.ndim == 1 && info_.item_type_is_equivalent_to<int32_t>() && info_.strides[0] == info_.itemsize,
        "row_order of '", name, "' must be contiguous int32");
    const size_t n_ordered = rows == 1 ? cols : rows;
    EH2O_CHECK(static_cast<size_t>(info_.size) == n_ordered, "row_order of '", name, "' must have ",
               n_ordered, " entries");
  }
  const int32_t* data() const { return static_cast<const int32_t*>(info_.ptr); }

 private:
  py::buffer_info info_;
};

void set_tensor(Decoder& decoder, const std::string& name, const py::buffer& data, const std::string& type,
                size_t rows, size_t cols, const std::optional<py::buffer>& row_order) {
  const py::buffer_info info = data.request();
  const Span<const uint8_t> bytes = contiguous_bytes(info, "the data of tensor '" + name + "'");
  const RowOrder order(row_order, name, rows, cols);
  const py::gil_scoped_release release;
  decoder.weights().set_tensor(name, type, bytes.data, bytes.size, rows, cols, order.data());
}

void add_update(Decoder& decoder, const std::string& name, size_t adapter, size_t rank, const py::buffer& a,
                const std::string& a_type, const py::buffer& b, const std::string& b_type) {
  const py::buffer_info of_a = a.request(), of_b = b.request();
  const Weights::Floats floats_a{a_type, contiguous_bytes(of_a, "the update of '" + name + "'")};
  const Weights::Floats floats_b{b_type, contiguous_bytes(of_b, "the update of '" + name + "'")};
  const py::gil_scoped_release release;
  decoder.weights().add_update(name, adapter, rank, floats_a, floats_b);
}

// A WeightReader, and what it points into.
class BoundWeightReader {
 public:
  // tensors: (name, type, offset, n_bytes, rows, cols, row_order or None) each.
  using Tensor =
      std::tuple<std::string, std::string, uint64_t, size_t, size_t, size_t, std::optional<py::buffer>>;

  // owner: of what the sink writes to.
  BoundWeightReader(std::shared_ptr<const void> owner, TensorSink sink, int descriptor,
                    const std::vector<Tensor>& tensors)
      : owner_(std::move(owner)), reader_(make_reader(std::move(sink), descriptor, tensors)) {}

  void run() {
    ReadStatus status;
    {
      const py::gil_scoped_release release;
      status = reader_.run();
    }
    if (status == ReadStatus::kReadError) throw_os_error(reader_.error_number());
    if (status != ReadStatus::kFileTooShort) return;
    PyErr_SetString(PyExc_EOFError, "the file ends before the tensor does");
    throw py::error_already_set();
  }
  void take_all_threads() { reader_.take_all_threads(); }
  void cancel() { reader_.cancel(); }
  size_t n_bytes_done() const { return reader_.n_bytes_done(); }

 private:
  WeightReader make_reader(TensorSink sink, int descriptor, const std::vector<Tensor>& tensors) {
    std::vector<TensorSource> sources;
    for (const auto& [name, type, offset, n_bytes, rows, cols, row_order] : tensors) {
      orders_.emplace_back(row_order, name, rows, cols);
      sources.push_back({name, type, offset, n_bytes, rows, cols, orders_.back().data()});
    }
    return WeightReader(std::move(sink), descriptor, std::move(sources));
  }

  std::shared_ptr<const void> owner_;
  std::vector<RowOrder> orders_;
  WeightReader reader_;
};

// Reads into the weights of a decoder, of the CPU or of a device.
template <typename T>
std::unique_ptr<BoundWeightReader> make_reader(const std::shared_ptr<T>& decoder, int descriptor,
                                               const std::vector<BoundWeightReader::Tensor>& tensors) {
  auto& weights = decoder->weights();
  TensorSink sink;
  sink.set_tensor = [&weights](const TensorSource& source, const uint8_t* data) {
    weights.set_tensor(source.name, source.type_name, data, source.n_bytes, source.rows, source.cols,
                       source.row_order);
  };
  if constexpr (std::is_same_v<std::decay_t<decltype(weights)>, Weights>) {
    sink.rows_at_once = [&weights](const TensorSource& source, size_t max_bytes) {
      return weights.rows_at_once(source.name, source.n_bytes, source.rows, source.cols, source.row_order,
                                  max_bytes);
    };
    sink.set_rows = [&weights](const TensorSource& source, const uint8_t* data, size_t n_bytes, size_t first,
                               size_t n_rows) {
      weights.set_rows(source.name, source.type_name, data, n_bytes, source.rows, source.cols, first, n_rows);
    };
  }
  return std::make_unique<BoundWeightReader>(decoder, sink, descriptor, tensors);
}

py::array_t<float> dequantize(const Decoder& decoder, const std::string& name) {
  size_t rows = 0, cols = 0;
  const std::vector<float> values = decoder.weights().dequantize(name, &rows, &cols);
  py::array_t<float> result({rows, cols});
  std::copy(values.begin(), values.end(), result.mutable_data());
  return result;
}

std::optional<size_t> find_bad_block_of(const py::buffer& data, const std::string& type) {
  const py::buffer_info info = data.request();
  const Span<const uint8_t> bytes = contiguous_bytes(info, "the data of a tensor");
  const py::gil_scoped_release release;
  const HeldTensor held(type, bytes.data, bytes.size);
  const auto bad = find_bad_block(held.info(), held.data(), held.n_bytes());
  // Counted in blocks of the file, of which the number and that of the held ones divide each other.
  return bad && held.n_blocks() ? std::optional(*bad * held.n_file_blocks() / held.n_blocks()) : bad;
}

// The rows as `to`, and the first that it cannot hold, or None.
std::pair<py::bytes, std::optional<size_t>> converted_rows(const py::buffer& data, const std::string& from,
                                                           const std::string& to, size_t rows, size_t cols) {
  const py::buffer_info info = data.request();
  const Span<const uint8_t> bytes = contiguous_bytes(info, "the data of a tensor");
  const HeldTensor held(from, bytes.data, bytes.size);
  const FormatInfo &source = held.info(), &target = find_format(to);
  check_tensor_data(source, held.n_bytes(), rows, cols, nullptr);
  EH2O_CHECK(cols % target.block_values == 0, "rows of ", cols, " weights are not whole ", to, " blocks of ",
             target.block_values);
  const size_t n_bytes = rows * (cols / target.block_values) * target.block_bytes;
  py::bytes out(nullptr, n_bytes);
  auto* written = reinterpret_cast<uint8_t*>(PyBytes_AS_STRING(out.ptr()));
  std::optional<size_t> bad;
  {
    const py::gil_scoped_release release;
    bad = convert_rows(source, target, held.data(), held.n_bytes(), written, n_bytes, rows, cols);
  }
  return {std::move(out), bad};
}

}  // namespace

void bind_model(py::module_& module) {
  module.def("written_types", &written_types);
  module.def("widened_types", [] {
    std::map<std::string, std::tuple<size_t, size_t>> types;
    for (const WidenedType& type : widened_types()) {
      const FormatInfo& held = find_format(type.held_name);
      types.emplace(type.type_name, std::make_tuple(held.block_values, held.block_bytes));
    }
    return types;
  });
  module.def("convert_rows", &converted_rows, py::arg("data"), py::arg("source"), py::arg("target"),
             py::arg("rows"), py::arg("cols"));
  module.def("find_bad_block", &find_bad_block_of, py::arg("data"), py::arg("type"));
  py::class_<DecoderConfig>(module, "DecoderConfig").def(py::init(&make_config));
  py::class_<Decoder, std::shared_ptr<Decoder>>(module, "Model")
      .def(py::init([](const DecoderConfig& config, std::shared_ptr<Decoder> main) {
             return std::make_shared<Decoder>(config, active_kernel_table(), std::move(main));
           }),
           py::arg("config"), py::arg("main") = py::none())
      .def("set_tensor", &set_tensor, py::arg("name"), py::arg("data"), py::arg("type"), py::arg("rows"),
           py::arg("cols"), py::arg("row_order") = py::none())
      .def("add_update", &add_update, py::arg("name"), py::arg("adapter"), py::arg("rank"), py::arg("a"),
           py::arg("a_type"), py::arg("b"), py::arg("b_type"))
      .def("dequantize", &dequantize, py::arg("name"))
      .def("finish", [](Decoder& decoder) { decoder.weights().finish(); })
      .def_property_readonly("balances_keys",
                             [](Decoder& decoder) { return decoder.weights().balances_keys(); })
      .def_property_readonly("config", &Decoder::config)
      .def_property_readonly("isa", [](Decoder& decoder) { return decoder.weights().table().name; })
      .def_property_readonly("weight_bytes", [](Decoder& decoder) { return decoder.weights().n_bytes(); })
      .def_property_readonly("mapped_bytes",
                             [](Decoder& decoder) { return decoder.weights().n_mapped_bytes(); });
  py::class_<BoundWeightReader>(module, "WeightReader")
      .def(py::init(&make_reader<Decoder>), py::arg("model"), py::arg("descriptor"), py::arg("tensors"))
      .def(py::init(&make_reader<cuda::DeviceDecoder>), py::arg("model"), py::arg("descriptor"),
           py::arg("tensors"))
      .def("run", &BoundWeightReader::run)
      .def("take_all_threads", &BoundWeightReader::take_all_threads)
      .def("cancel", &BoundWeightReader::cancel)
      .def_property_readonly("n_bytes_done", &BoundWeightReader::n_bytes_done);
}

}  // namespace edgeh2o
