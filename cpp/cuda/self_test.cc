#include "cuda/self_test.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "cuda/launches.h"
#include "cuda/tiles.h"

namespace edgeh2o::cuda {
namespace {

constexpr size_t kRows = 9, kOutputs = 40, kDepth = 160;
constexpr double kTolerance = 1e-5;  // of the sum of magnitudes

// Small numbers that look random, the same everywhere.
class Numbers {
 public:
  uint32_t next() { return (state_ = state_ * 1664525u + 1013904223u) >> 8; }
  float real() { return static_cast<float>(next() % 2001) / 1000.0f - 1.0f; }

 private:
  uint32_t state_ = 1;
};

class Scratch {
 public:
  explicit Scratch(Device& device) : device_(device), pinned_(device, size_t{1} << 20, true) {}

  void* put(const void* data, size_t n_bytes) {
    buffers_.emplace_back(device_, n_bytes);
    std::memcpy(pinned_.as<void>(), data, n_bytes);
    device_.upload(buffers_.back().as<void>(), pinned_.as<void>(), n_bytes);
    device_.wait();
    return buffers_.back().as<void>();
  }
  template <typename T>
  T* put(const std::vector<T>& data) {
    return static_cast<T*>(put(data.data(), data.size() * sizeof(T)));
  }
  template <typename T>
  std::vector<T> get(const T* from, size_t n) {
    device_.download(pinned_.as<void>(), from, n * sizeof(T));
    device_.wait();
    std::vector<T> values(n);
    std::memcpy(values.data(), pinned_.as<void>(), n * sizeof(T));
    return values;
  }

 private:
  Device& device_;
  DeviceBuffer pinned_;
  std::vector<DeviceBuffer> buffers_;
};

std::string test_format(Device& device, const char* type_name, Numbers& numbers) {
  Scratch scratch(device);
  const FormatInfo& info = find_format(type_name);
  std::vector<uint8_t> blocks(kOutputs * kDepth / info.block_values * info.block_bytes);
  for (size_t i = 0; i < blocks.size(); ++i) {
    // Scales are f16 at the beginning of a block, and small.
    const size_t at = i % info.block_bytes,
                 n_scale_bytes = info.block_bytes - (info.format == PackedFormat::kQ8_0 ? 32 : 16);
    blocks[i] = static_cast<uint8_t>(at >= n_scale_bytes ? numbers.next()
                                     : at % 2 == 0       ? numbers.next()
                                                         : 0x2c);
  }
  const WeightFormat format = device_format(info.format);
  const TileSizes sizes(format, kOutputs, kDepth);
  std::vector<uint8_t> values(sizes.n_panels * sizes.value_bytes);
  std::vector<uint16_t> scales(sizes.n_panels * sizes.scale_bytes / 2);
  std::vector<float> factors(sizes.factor_bytes() / 4);
  pack_panels(info, blocks.data(), kOutputs, kDepth, nullptr, 0, sizes.n_panels, values.data(), scales.data(),
              factors.data());
  const DeviceMatrix matrix{scratch.put(values),
                            scratch.put(scales),
                            scratch.put(factors),
                            kOutputs,
                            kDepth,
                            static_cast<uint32_t>(sizes.n_tiles),
                            format};

  std::vector<float> x(kRows * kDepth);
  for (float& value : x) value = numbers.real();
  const size_t padded = round_up(kDepth, kTileDepth);
  const QuantisedRows xq{scratch.put(std::vector<int8_t>(kRows * padded)),
                         scratch.put(std::vector<float>(kRows * padded / 32)), static_cast<uint32_t>(padded)};
  device.launch("norm_rows",
                NormArguments{scratch.put(x), nullptr, nullptr, xq, kDepth, 1, kDepth, kDepth, 0.0f}, kRows,
                1, 1, kNormThreads, kSmallShared);

  const std::vector<int8_t> q = scratch.get(xq.q, kRows * padded);
  const std::vector<float> d = scratch.get(xq.d, kRows * padded / 32);
  for (size_t i = 0; i < kRows * kDepth; ++i) {
    const size_t at = i / kDepth * padded + i % kDepth;
    if (std::fabs(q[at] * d[at / 32] - x[i]) > 0.51f * d[at / 32]) return "rows are rounded wrongly";
  }
  const PackedMatrix weights(info, 1, false, blocks.data(), blocks.size(), kOutputs, kDepth, nullptr);
  std::vector<float> row(kDepth);
  for (const bool is_matrix : {false, true}) {
    float* const out = scratch.put(std::vector<float>(kRows * kOutputs));
    const MultiplyArguments arguments{matrix, nullptr, xq, nullptr, out, 0, kOutputs, 0, kRows};
    const char* name = multiply_kernel(format);
    if (is_matrix) {
      const GemmKernel kernel = gemm_kernel(format, kRows, kOutputs, 1);
      name = kernel.name;
      device.launch(name, arguments, ceil_div(kOutputs, size_t{kGemmTile}), 1, 1, kThreads,
                    kernel.shared_bytes);
    } else {
      launch_row_products(device, arguments, 1);
    }
    const std::vector<float> got = scratch.get(out, kRows * kOutputs);
    for (size_t i = 0; i < kOutputs; ++i) {
      weights.dequantize_row(row.data(), i);
      for (size_t r = 0; r < kRows; ++r) {
        double sum = 0.0, size = 0.0;
        for (size_t k = 0; k < kDepth; ++k) {
          const size_t at = r * padded + k;
          const double product = static_cast<double>(row[k]) * q[at] * d[at / 32];
          sum += product, size += std::fabs(product);
        }
        if (!(std::fabs(got[r * kOutputs + i] - sum) <= kTolerance * (size + std::fabs(sum)))) {
          return std::string(name) + " gives wrong products";
        }
      }
    }
  }
  return "";
}

}  // namespace

std::string run_self_test(Device& device) {
  Numbers numbers;
  for (const char* type_name : {"Q8_0", "Q4_1"}) {
    const std::string difference = test_format(device, type_name, numbers);
    if (!difference.empty()) return difference;
  }
  return "";
}

}  // namespace edgeh2o::cuda
