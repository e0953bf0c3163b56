#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "base/check.h"
#include "bindings/register.h"
#include "isa/select.h"
#include "model/decoder.h"

namespace py = pybind11;

namespace edgeh2o {
namespace {

DecoderConfig make_config(size_t n_layers, size_t model_dim, size_t n_heads, size_t n_kv_heads,
                          size_t head_dim, size_t rotary_dim, size_t ffn_dim, size_t vocab_size,
                          float norm_eps, std::vector<float> rope_inv_freq, float attention_scale,
                          float rope_attention_factor, float embedding_scale, float residual_scale,
                          float logit_scale, bool tied_embeddings, const std::string& activation) {
  EH2O_CHECK(rope_inv_freq.size() * 2 == rotary_dim, "rope_inv_freq has ", rope_inv_freq.size(),
             " entries, expected half of rotary_dim = ", rotary_dim);
  EH2O_CHECK(activation == "silu", "activation '", activation, "' is not supported; supported: silu");
  EH2O_CHECK(residual_scale == 1.0f, "residual_scale = ", residual_scale, " is not supported; supported: 1");
  DecoderConfig config;
  config.n_layers = n_layers;
  config.model_dim = model_dim;
  config.n_heads = n_heads;
  config.n_kv_heads = n_kv_heads;
  config.head_dim = head_dim;
  config.ffn_dim = ffn_dim;
  config.vocab_size = vocab_size;
  config.norm_eps = norm_eps;
  config.rope_inv_freq = std::move(rope_inv_freq);
  config.rope_attention_factor = rope_attention_factor;
  config.attention_scale = attention_scale;
  config.embedding_scale = embedding_scale;
  config.logit_scale = logit_scale;
  config.tied_embeddings = tied_embeddings;
  config.check();
  return config;
}

using Int32Array = py::array_t<int32_t, py::array::c_style>;

void set_tensor(Decoder& decoder, const std::string& name, const py::buffer& data, const std::string& type,
                size_t rows, size_t cols, const std::optional<Int32Array>& row_order) {
  const py::buffer_info info = data.request();
  EH2O_CHECK(info.ndim == 1 && info.itemsize == 1 && info.strides[0] == 1, "the data of tensor '", name,
             "' must be contiguous bytes");
  const size_t n_ordered = rows == 1 ? cols : rows;
  EH2O_CHECK(!row_order || static_cast<size_t>(row_order->size()) == n_ordered, "row_order of '", name,
             "' must have ", n_ordered, " entries");
  const int32_t* order = row_order ? row_order->data() : nullptr;
  const py::gil_scoped_release release;
  decoder.weights().set_tensor(name, type, static_cast<const uint8_t*>(info.ptr),
                               static_cast<size_t>(info.size), rows, cols, order);
}

}  // namespace

void bind_model(py::module_& module) {
  py::class_<DecoderConfig>(module, "DecoderConfig")
      .def(py::init(&make_config), py::kw_only(), py::arg("n_layers"), py::arg("model_dim"),
           py::arg("n_heads"), py::arg("n_kv_heads"), py::arg("head_dim"), py::arg("rotary_dim"),
           py::arg("ffn_dim"), py::arg("vocab_size"), py::arg("norm_eps"), py::arg("rope_inv_freq"),
           py::arg("attention_scale"), py::arg("rope_attention_factor") = 1.0f,
           py::arg("embedding_scale") = 1.0f, py::arg("residual_scale") = 1.0f, py::arg("logit_scale") = 1.0f,
           py::arg("tied_embeddings") = false, py::arg("activation") = "silu");
  py::class_<Decoder, std::shared_ptr<Decoder>>(module, "Model")
      .def(py::init([](const DecoderConfig& config) {
             return std::make_shared<Decoder>(config, active_kernel_table());
           }),
           py::arg("config"))
      .def("set_tensor", &set_tensor, py::arg("name"), py::arg("data"), py::arg("type"), py::arg("rows"),
           py::arg("cols"), py::arg("row_order") = py::none())
      .def("finish", [](Decoder& decoder) { decoder.weights().check_complete(); })
      .def_property_readonly("config", &Decoder::config)
      .def_property_readonly("isa", [](Decoder& decoder) { return decoder.weights().table().name; })
      .def_property_readonly("weight_bytes", [](Decoder& decoder) { return decoder.weights().n_bytes(); });
}

}  // namespace edgeh2o
