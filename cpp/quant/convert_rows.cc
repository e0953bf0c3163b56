#include "quant/convert_rows.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "base/check.h"
#include "base/half.h"
#include "base/parallel.h"
#include "quant/block_quantizer.h"
#include "quant/tensor_check.h"

namespace edgeh2o {
namespace {

void read_floats(PackedFormat format, const uint8_t* in, float* out, size_t n) {
  if (format == PackedFormat::kF32) {
    std::memcpy(out, in, 4 * n);
    return;
  }
  for (size_t i = 0; i < n; ++i) {
    const auto bits = static_cast<uint16_t>(in[2 * i] | in[2 * i + 1] << 8);
    out[i] = format == PackedFormat::kF16 ? f32_from_f16(bits) : f32_from_bf16(bits);
  }
}

}  // namespace

std::vector<std::string> written_types() {
  std::vector<std::string> names;
  for (const FormatInfo& info : supported_formats()) {
    if (find_row_quantizer(info.format)) names.emplace_back(info.type_name);
  }
  return names;
}

std::optional<size_t> convert_rows(const FormatInfo& from, const FormatInfo& to, const uint8_t* in,
                                   size_t in_bytes, uint8_t* out, size_t out_bytes, size_t rows,
                                   size_t cols) {
  const RowQuantizer quantize = find_row_quantizer(to.format);
  EH2O_CHECK(quantize, "weights cannot be written as ", to.type_name);
  check_tensor_data(from, in_bytes, rows, cols, nullptr);
  check_tensor_data(to, out_bytes, rows, cols, nullptr);
  const size_t in_row = in_bytes / rows, out_row = out_bytes / rows;
  // One row is one panel of one column: quants are read as everywhere else.
  PackedMatrix matrix;
  if (from.is_quantised) matrix = PackedMatrix(from, 1, false, in, in_bytes, rows, cols, nullptr);
  std::vector<std::vector<float>> buffers(static_cast<size_t>(num_threads()), std::vector<float>(cols));
  std::atomic<size_t> first_bad{rows};
  parallel_for(rows, [&](size_t row, size_t thread) {
    float* weights = buffers[thread].data();
    if (from.is_quantised) {
      matrix.dequantize_row(weights, row);
    } else {
      read_floats(from.format, in + row * in_row, weights, cols);
    }
    uint8_t* written = out + row * out_row;
    bool is_good = std::all_of(weights, weights + cols, [](float x) { return std::isfinite(x); });
    if (is_good) {
      quantize(weights, cols, written);
      is_good = !find_bad_block(to, written, out_row);  // a scale that half precision does not reach
    }
    for (size_t seen = first_bad; !is_good && row < seen && !first_bad.compare_exchange_weak(seen, row);) {
    }
  });
  if (first_bad < rows) return first_bad.load();
  return std::nullopt;
}

}  // namespace edgeh2o
