#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <map>

#include "base/check.h"
#include "bindings/buffers.h"
#include "bindings/model_config.h"
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
  py::register_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const RowTableError& table_error) {
      const py::object type = py::module_::import("edgeh2o.errors").attr("ResourceError");
      PyErr_SetString(type.ptr(), table_error.what());
    }
  });
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
      .def(
          "set_ngram_rows",
          [](Decoder& decoder, int descriptor, const std::string& type, uint64_t offset, size_t rows,
             size_t cols) {
            decoder.weights().set_ngram_rows(RowTable(descriptor, type, offset, rows, cols));
          },
          py::arg("descriptor"), py::arg("type"), py::arg("offset"), py::arg("rows"), py::arg("cols"))
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
