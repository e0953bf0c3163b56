#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <set>
#include <system_error>

#include "bindings/buffers.h"
#include "bindings/register.h"
#include "model/decoder.h"
#include "quant/widened_types.h"

namespace py = pybind11;

namespace edgeh2o {
namespace {

// What of a kernel table the bytes of packed matrices depend on, and their version.
std::tuple<uint32_t, size_t, uint32_t> packed_layout(const Decoder& decoder) {
  const PackLayout& layout = decoder.weights().table().layout;
  return {kPackedLayoutVersion, layout.panel_cols, layout.signed_formats};
}

std::set<std::string> matrix_names(const Decoder& decoder) {
  std::set<std::string> names;
  for (const auto& [name, slot] : decoder.weights().slots()) {
    if (slot.matrix) names.insert(name);
  }
  return names;
}

std::tuple<std::string, size_t, size_t, size_t> describe_packed(const Decoder& decoder,
                                                                const std::string& name) {
  const PackedMatrix& matrix = decoder.weights().find_packed(name);
  return {format_info(matrix.format()).type_name, matrix.rows(), matrix.cols(), matrix.n_bytes()};
}

// macOS refuses calls of 2 GiB and more, of which Linux writes a part.
constexpr size_t kMaxWriteBytes = size_t{1} << 30;

void write_packed(const Decoder& decoder, const std::string& name, int descriptor, uint64_t offset) {
  const PackedMatrix& matrix = decoder.weights().find_packed(name);
  const uint8_t* data = matrix.panel(0);
  size_t n_left = matrix.n_bytes();
  int error = 0;
  {
    const py::gil_scoped_release release;
    while (n_left > 0 && error == 0) {
      const size_t n_bytes = std::min(n_left, kMaxWriteBytes);
      const ssize_t n = pwrite(descriptor, data, n_bytes, static_cast<off_t>(offset));
      if (n < 0) {
        error = errno == EINTR ? 0 : errno;
        continue;
      }
      data += n;
      offset += static_cast<uint64_t>(n);
      n_left -= static_cast<size_t>(n);
    }
  }
  if (error != 0) throw_os_error(error);
}

// tensors: as Weights::PackedTensor.
using Tensor = std::tuple<std::string, std::string, std::string, size_t, size_t, size_t>;

void map_packed(Decoder& decoder, int descriptor, const std::vector<Tensor>& tensors, bool is_beyond_memory) {
  std::vector<Weights::PackedTensor> sources;
  sources.reserve(tensors.size());
  for (const auto& [name, tensor_type, packed_type, rows, cols, offset] : tensors) {
    sources.push_back({name, tensor_type, packed_type, rows, cols, offset});
  }
  try {
    const py::gil_scoped_release release;
    decoder.weights().map_packed(MappedFile(descriptor), sources, is_beyond_memory);
  } catch (const std::system_error& error) {
    throw_os_error(error.code().value());
  }
}

void hold_packed(Decoder& decoder, const std::string& name, int descriptor, uint64_t offset) {
  try {
    const py::gil_scoped_release release;
    decoder.weights().hold_packed(name, descriptor, offset);
  } catch (const std::system_error& error) {
    throw_os_error(error.code().value());
  }
}

// A matrix as it lies in memory in any layout, for the tests.
py::bytes pack_matrix(const py::buffer& data, const std::string& type, size_t rows, size_t cols,
                      size_t panel_cols, bool is_signed) {
  const py::buffer_info info = data.request();
  const Span<const uint8_t> bytes = contiguous_bytes(info, "the data of a tensor");
  const PackedMatrix matrix = pack_tensor(type, bytes.data, bytes.size, rows, cols, panel_cols, is_signed);
  return py::bytes(reinterpret_cast<const char*>(matrix.panel(0)), matrix.n_bytes());
}

}  // namespace

void bind_packed_weights(py::module_& module) {
  module.def("packed_layout", &packed_layout, py::arg("model"));
  module.def("pack_matrix", &pack_matrix, py::arg("data"), py::arg("type"), py::arg("rows"), py::arg("cols"),
             py::arg("panel_cols"), py::arg("is_signed"));
  module.def("matrix_names", &matrix_names, py::arg("model"));
  module.def("describe_packed", &describe_packed, py::arg("model"), py::arg("name"));
  module.def("write_packed", &write_packed, py::arg("model"), py::arg("name"), py::arg("descriptor"),
             py::arg("offset"));
  module.def("map_packed", &map_packed, py::arg("model"), py::arg("descriptor"), py::arg("tensors"),
             py::arg("is_beyond_memory"));
  module.def("hold_packed", &hold_packed, py::arg("model"), py::arg("name"), py::arg("descriptor"),
             py::arg("offset"));
}

}  // namespace edgeh2o
