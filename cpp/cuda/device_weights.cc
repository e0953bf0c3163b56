#include "cuda/device_weights.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"

namespace edgeh2o::cuda {
namespace {

// Of pinned memory: what is packed at a time. A larger panel makes it larger.
constexpr size_t kStagingBytes = size_t{16} << 20;

}  // namespace

DeviceWeights::DeviceWeights(const DecoderConfig& config, const KernelTable& table, Device& device)
    : device_(device), host_(config, table), pool_(device) {}

size_t DeviceWeights::estimate_bytes(const std::string& type_name, size_t rows, size_t cols) {
  if (rows == 1) return cols * sizeof(float);
  return TileSizes(device_format(find_format(type_name).format), rows, cols).n_bytes();
}

void DeviceWeights::upload(void* to, const void* from, size_t n_bytes) {
  device_.upload(to, from, n_bytes);
  device_.wait();
}

void DeviceWeights::set_tensor(const std::string& name, const std::string& type_name, const uint8_t* data,
                               size_t n_bytes, size_t rows, size_t cols, const int32_t* row_order) {
  const Weights::Slot& slot = host_.find_slot(name, rows, cols);
  if (slot.vector) return host_.set_tensor(name, type_name, data, n_bytes, rows, cols, row_order);
  const FormatInfo& info = find_format(type_name);
  check_tensor_data(info, n_bytes, rows, cols, row_order);
  const WeightFormat format = device_format(info.format);
  const TileSizes sizes(format, rows, cols);
  const size_t panel_bytes = sizes.value_bytes + sizes.scale_bytes + (sizes.scale_bytes ? kPanelRows * 4 : 0);
  if (staging_.size() < std::max(panel_bytes, kStagingBytes)) {
    staging_ = DeviceBuffer();
    staging_ = DeviceBuffer(device_, std::max(panel_bytes, kStagingBytes), true);
  }
  auto* const values = static_cast<uint8_t*>(pool_.take(sizes.n_panels * sizes.value_bytes));
  uint8_t *scales = nullptr, *factors = nullptr;
  if (is_tiled(format)) {
    scales = static_cast<uint8_t*>(pool_.take(sizes.n_panels * sizes.scale_bytes));
    factors = static_cast<uint8_t*>(pool_.take(sizes.factor_bytes()));
  }
  const size_t at_once = staging_.size() / panel_bytes;
  for (size_t first = 0; first < sizes.n_panels; first += at_once) {
    const size_t count = std::min(at_once, sizes.n_panels - first);
    uint8_t* const staged = staging_.as<uint8_t>();
    uint8_t* const staged_scales = staged + count * sizes.value_bytes;
    uint8_t* const staged_factors = staged_scales + count * sizes.scale_bytes;
    pack_panels(info, data, rows, cols, row_order, first, count, staged,
                reinterpret_cast<uint16_t*>(staged_scales), reinterpret_cast<float*>(staged_factors));
    upload(values + first * sizes.value_bytes, staged, count * sizes.value_bytes);
    if (!is_tiled(format)) continue;
    upload(scales + first * sizes.scale_bytes, staged_scales, count * sizes.scale_bytes);
    upload(factors + first * kPanelRows * 4, staged_factors, count * kPanelRows * 4);
  }
  matrices_[slot.matrix] = {values,
                            reinterpret_cast<const uint16_t*>(scales),
                            reinterpret_cast<const float*>(factors),
                            static_cast<uint32_t>(rows),
                            static_cast<uint32_t>(cols),
                            static_cast<uint32_t>(sizes.n_tiles),
                            format};
}

void DeviceWeights::finish() {
  host_.check_complete(
      [this](const Weights::Slot& slot) { return slot.matrix ? has(*slot.matrix) : !slot.vector->empty(); });
  for (const auto& [name, slot] : host_.slots()) {
    if (slot.matrix || slot.vector->empty()) continue;
    vectors_[slot.vector] =
        static_cast<const float*>(keep(slot.vector->data(), slot.vector->size() * sizeof(float)));
  }
  std::vector<DeviceMatrix> parts;
  for (const PackedMatrix& part : host_.token_inputs()) parts.push_back(matrix(part));
  if (!parts.empty()) {
    token_inputs_ = static_cast<const DeviceMatrix*>(keep(parts.data(), parts.size() * sizeof(DeviceMatrix)));
  }
  staging_ = DeviceBuffer();
}

// A copy on the device.
void* DeviceWeights::keep(const void* data, size_t n_bytes) {
  void* const to = pool_.take(n_bytes);
  if (staging_.size() < n_bytes) {
    staging_ = DeviceBuffer();
    staging_ = DeviceBuffer(device_, n_bytes, true);
  }
  std::memcpy(staging_.as<uint8_t>(), data, n_bytes);
  upload(to, staging_.as<uint8_t>(), n_bytes);
  return to;
}

const float* DeviceWeights::vector(const std::vector<float>& values) const {
  return values.empty() ? nullptr : vectors_.at(&values);
}

}  // namespace edgeh2o::cuda
