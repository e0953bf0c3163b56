// Matrix products with packed weights on their own, for other runtimes.
#include "ops/matmul.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "base/arena.h"
#include "base/check.h"
#include "base/parallel.h"
#include "bindings/buffers.h"
#include "bindings/register.h"
#include "isa/select.h"
#include "model/weights.h"
#include "quant/nbits_blocks.h"

namespace py = pybind11;

namespace edgeh2o {
namespace {

// Its own memory, which results are written to.
using OwnFloatArray = py::array_t<float, py::array::c_style>;

// A weight [n_out][n_in] with its bias, packed for one kernel table.
struct PackedLinear {
  PackedLinear(const py::buffer& data, const std::string& type, size_t rows, size_t cols,
               const std::optional<OwnFloatArray>& bias)
      : table(active_kernel_table()) {
    const py::buffer_info info = data.request();
    const Span<const uint8_t> bytes = contiguous_bytes(info, "the data of a weight");
    if (bias) {
      EH2O_CHECK(static_cast<size_t>(bias->size()) == rows, "a bias of ", bias->size(), " values for ", rows,
                 " outputs");
      linear.bias.assign(bias->data(), bias->data() + rows);
    }
    const FormatInfo& format = find_format(type);
    const py::gil_scoped_release release;
    linear.weight = PackedMatrix(format, table.layout.panel_cols, table.layout.is_signed(format.format),
                                 bytes.data, bytes.size, rows, cols, nullptr);
  }

  const KernelTable& table;
  Linear linear;
};

using Bytes = py::array_t<uint8_t, py::array::c_style>;

// Blocks of GGUF, [rows, bytes], of a MatMulNBits: quants and zero points are [rows, bytes], scales
// [rows, blocks]. None if a scale is out of the range of halves.
std::optional<Bytes> join_blocks(const Bytes& quants, const OwnFloatArray& scales,
                                 const std::optional<Bytes>& zero_points, int bits, size_t n_inputs,
                                 size_t block_size) {
  EH2O_CHECK(bits == 4 || (bits == 8 && !zero_points), "blocks of ", bits, " bits cannot be joined");
  EH2O_CHECK(quants.ndim() == 2 && scales.ndim() == 2 && (!zero_points || zero_points->ndim() == 2),
             "quants, scales and zero points must be matrices");
  NBitsMatrix matrix{};
  matrix.rows = static_cast<size_t>(scales.shape(0));
  matrix.n_blocks = static_cast<size_t>(scales.shape(1));
  matrix.n_inputs = n_inputs;
  matrix.block_size = block_size;
  matrix.bits = bits;
  matrix.quant_stride = static_cast<size_t>(quants.shape(1));
  if (zero_points) matrix.zero_stride = static_cast<size_t>(zero_points->shape(1));
  EH2O_CHECK(n_inputs > 0 && n_inputs % 32 == 0 && block_size > 0 && block_size % 32 == 0 &&
                 matrix.n_blocks == ceil_div(n_inputs, block_size),
             matrix.n_blocks, " blocks of ", block_size, " values do not fit ", n_inputs, " inputs");
  EH2O_CHECK(static_cast<size_t>(quants.shape(0)) == matrix.rows &&
                 matrix.quant_stride >= n_inputs / 8 * static_cast<size_t>(bits) &&
                 (!zero_points || (static_cast<size_t>(zero_points->shape(0)) == matrix.rows &&
                                   matrix.zero_stride >= ceil_div(matrix.n_blocks, 2))),
             "scales of ", matrix.rows, " x ", matrix.n_blocks,
             " blocks do not fit the quants or zero points");
  matrix.quants = quants.data();
  matrix.scales = scales.data();
  matrix.zero_points = zero_points ? zero_points->data() : nullptr;
  Bytes joined({matrix.rows, held_row_bytes(matrix)});
  uint8_t* out = joined.mutable_data();
  {
    const py::gil_scoped_release release;
    if (join_nbits_rows(matrix, out)) out = nullptr;
  }
  return out ? std::nullopt : std::optional<Bytes>(std::move(joined));
}

// The memory that products need, allocated once: 8-bit activations of max_rows rows, and scratch per thread.
class Matmul {
 public:
  Matmul(size_t max_rows, size_t max_depth, std::optional<int> n_threads)
      : table_(active_kernel_table()),
        max_rows_(max_rows),
        max_depth_(max_depth),
        n_threads_(n_threads.value_or(num_threads())),
        packed_(Activations8::bytes(table_, max_rows, max_depth)),
        scratch_(static_cast<size_t>(n_threads_) * matmul_scratch_bytes(table_)) {}

  // outs[i] [n][n_out] = x [n][n_in] times the transpose of weights[i], plus its bias.
  void run(const OwnFloatArray& x, const std::vector<std::shared_ptr<PackedLinear>>& weights,
           std::vector<OwnFloatArray> outs) {
    EH2O_CHECK(x.ndim() == 2, "x must be [n][n_in], got ", x.ndim(), " dimensions");
    const auto n_rows = static_cast<size_t>(x.shape(0)), depth = static_cast<size_t>(x.shape(1));
    EH2O_CHECK(n_rows > 0 && n_rows <= max_rows_ && depth <= max_depth_, "x must have 1 to ", max_rows_,
               " rows of at most ", max_depth_, ", got [", n_rows, "][", depth, "]");
    EH2O_CHECK(weights.size() == outs.size() && !weights.empty(), weights.size(), " weights for ",
               outs.size(), " outputs");
    std::vector<MatmulOutput> outputs;
    PackedOut out;
    for (size_t i = 0; i < weights.size(); ++i) {
      const Linear& linear = weights[i]->linear;
      EH2O_CHECK(&weights[i]->table == &table_, "the weight is packed for ", weights[i]->table.name,
                 ", the active instruction set is ", table_.name);
      EH2O_CHECK(linear.weight.cols() == depth, "weight ", i, " has ", linear.weight.cols(), " inputs, x ",
                 depth);
      EH2O_CHECK(outs[i].ndim() == 2 && static_cast<size_t>(outs[i].shape(0)) == n_rows &&
                     static_cast<size_t>(outs[i].shape(1)) == linear.weight.rows() && outs[i].writeable(),
                 "output ", i, " must be a writable array [", n_rows, "][", linear.weight.rows(), "]");
      const PackedOut own = packed_for(table_, packed_.data(), {&linear.weight}, false);
      if (own.packed) out = {own.packed, std::max(out.scale_block, own.scale_block)};
      outputs.push_back({&linear.weight, linear.bias.empty() ? nullptr : linear.bias.data(),
                         outs[i].mutable_data(), linear.weight.rows()});
    }
    const MatView<const float> rows{x.data(), n_rows, depth, depth};
    const py::gil_scoped_release release;
    const std::lock_guard<std::mutex> lock(mutex_);
    const ThreadScope threads(n_threads_);
    Activations8 packed;
    if (out.packed) packed = quantize_rows(table_, rows, out);
    matmul(table_, {packed, rows}, {outputs.data(), outputs.size()}, {scratch_.data(), {}});
  }

  size_t n_bytes() const { return packed_.size() + scratch_.size(); }

 private:
  const KernelTable& table_;
  size_t max_rows_, max_depth_;
  int n_threads_;
  AlignedBuffer packed_, scratch_;
  std::mutex mutex_;  // of both
};

}  // namespace

void bind_matmul(py::module_& module) {
  module.def("join_nbits_blocks", &join_blocks, py::arg("quants").noconvert(), py::arg("scales").noconvert(),
             py::arg("zero_points"), py::arg("bits"), py::arg("n_inputs"), py::arg("block_size"));
  py::class_<PackedLinear, std::shared_ptr<PackedLinear>>(module, "Linear")
      .def(py::init<const py::buffer&, const std::string&, size_t, size_t,
                    const std::optional<OwnFloatArray>&>(),
           py::arg("data"), py::arg("type"), py::arg("rows"), py::arg("cols"), py::arg("bias") = py::none())
      .def_property_readonly("rows", [](const PackedLinear& self) { return self.linear.weight.rows(); })
      .def_property_readonly("cols", [](const PackedLinear& self) { return self.linear.weight.cols(); })
      .def_property_readonly("n_bytes",
                             [](const PackedLinear& self) { return self.linear.weight.n_bytes(); });
  py::class_<Matmul>(module, "Matmul")
      .def(py::init<size_t, size_t, std::optional<int>>(), py::arg("max_rows"), py::arg("max_depth"),
           py::arg("threads") = py::none())
      .def("run", &Matmul::run, py::arg("x").noconvert(), py::arg("weights"), py::arg("outs"))
      .def_property_readonly("n_bytes", &Matmul::n_bytes);
}

}  // namespace edgeh2o
