#include "cuda/device_weights.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "quant/widened_types.h"

namespace edgeh2o::cuda {
namespace {

// Of pinned memory: what is packed at a time. A larger panel makes it larger.
constexpr size_t kStagingBytes = size_t{16} << 20;

}  // namespace

DeviceWeights::DeviceWeights(const DecoderConfig& config, const KernelTable& table, Device& device,
                             size_t block_bytes)
    : device_(device),
      n_layers_(config.n_layers()),
      token_input_rows_(config.token_input_rows),
      host_(config, table),
      pool_(device, block_bytes) {}

size_t DeviceWeights::estimate_bytes(const std::string& type_name, size_t rows, size_t cols) {
  if (rows == 1) return cols * sizeof(float);
  return TileSizes(device_format(find_held_format(type_name).format), rows, cols).n_bytes();
}

// Of a part of a matrix, in whole tiles of products if it has tiles. That of the vocabulary, most often the
// largest, and whatever is larger than a block lie in quarters of blocks, which leaves little of them unused.
size_t DeviceWeights::rows_of_part(const PackedMatrix* matrix, WeightFormat format, size_t rows,
                                   size_t cols) const {
  const auto n_bytes = [&](size_t n) { return TileSizes(format, n, cols).n_bytes(); };
  const std::vector<PackedMatrix>& inputs = host_.token_inputs();
  if (!inputs.empty() && matrix >= &inputs.front() && matrix <= &inputs.back()) {
    // One table with the others like it, whose parts have to be of the same rows.
    size_t n = token_input_rows_;
    while (n_bytes(n) > pool_.block_bytes() && n % (2 * kGemmTile) == 0) n /= 2;
    return n;
  }
  const bool is_vocabulary = matrix == &host_.token_embd() || matrix == &host_.own_output();
  if (!is_vocabulary && n_bytes(rows) <= pool_.block_bytes()) return rows;
  const size_t step = is_tiled(format) ? kGemmTile : 1;
  return std::max<size_t>(1, pool_.block_bytes() / 4 / n_bytes(step)) * step;
}

size_t DeviceWeights::n_out(const PackedMatrix& name) const {
  size_t n = 0;
  for (const DeviceMatrix& part : parts(name)) n += part.n_out;
  return n;
}

void DeviceWeights::upload(void* to, const void* from, size_t n_bytes) {
  device_.upload(to, from, n_bytes);
  device_.wait();
}

void DeviceWeights::set_tensor(const std::string& name, const std::string& type_name, const uint8_t* data,
                               size_t n_bytes, size_t rows, size_t cols, const int32_t* row_order) {
  const Weights::Slot& slot = host_.find_slot(name, rows, cols);
  if (slot.vector) return host_.set_tensor(name, type_name, data, n_bytes, rows, cols, row_order);
  const HeldTensor held(type_name, data, n_bytes);
  if (slot.is_transposed) {
    EH2O_CHECK(!row_order, "the rows of tensor '", name, "' have no order of their own");
    const TransposedTensor transposed(held, rows, cols);
    return set_matrix(slot.matrix, transposed.info(), transposed.data(), cols, rows, nullptr);
  }
  check_tensor_data(held.info(), held.n_bytes(), rows, cols, row_order);
  set_matrix(slot.matrix, held.info(), held.data(), rows, cols, row_order);
}

void DeviceWeights::set_matrix(const PackedMatrix* matrix, const FormatInfo& info, const uint8_t* data,
                               size_t rows, size_t cols, const int32_t* row_order) {
  const WeightFormat format = device_format(info.format);
  const TileSizes sizes(format, rows, cols);
  const size_t panel_bytes = sizes.value_bytes + sizes.scale_bytes + (sizes.scale_bytes ? kPanelRows * 4 : 0);
  if (staging_.size() < std::max(panel_bytes, kStagingBytes)) {
    staging_ = DeviceBuffer();
    staging_ = DeviceBuffer(device_, std::max(panel_bytes, kStagingBytes), true);
  }
  std::vector<DeviceMatrix>& parts = matrices_[matrix];
  parts.clear();
  const size_t part_rows = rows_of_part(matrix, format, rows, cols);
  for (size_t row = 0; row < rows; row += part_rows) {
    const size_t n_rows = std::min(part_rows, rows - row);
    const size_t first_panel = is_tiled(format) ? row / kPanelRows : row;
    const TileSizes part(format, n_rows, cols);
    auto* const values = static_cast<uint8_t*>(pool_.take(part.n_panels * part.value_bytes));
    uint8_t *scales = nullptr, *factors = nullptr;
    if (is_tiled(format)) {
      scales = static_cast<uint8_t*>(pool_.take(part.n_panels * part.scale_bytes));
      factors = static_cast<uint8_t*>(pool_.take(part.factor_bytes()));
    }
    const size_t at_once = staging_.size() / panel_bytes;
    for (size_t first = 0; first < part.n_panels; first += at_once) {
      const size_t count = std::min(at_once, part.n_panels - first);
      uint8_t* const staged = staging_.as<uint8_t>();
      uint8_t* const staged_scales = staged + count * part.value_bytes;
      uint8_t* const staged_factors = staged_scales + count * part.scale_bytes;
      pack_panels(info, data, rows, cols, row_order, first_panel + first, count, staged,
                  reinterpret_cast<uint16_t*>(staged_scales), reinterpret_cast<float*>(staged_factors));
      upload(values + first * part.value_bytes, staged, count * part.value_bytes);
      if (!is_tiled(format)) continue;
      upload(scales + first * part.scale_bytes, staged_scales, count * part.scale_bytes);
      upload(factors + first * kPanelRows * 4, staged_factors, count * kPanelRows * 4);
    }
    parts.push_back({values, reinterpret_cast<const uint16_t*>(scales),
                     reinterpret_cast<const float*>(factors), static_cast<uint32_t>(n_rows),
                     static_cast<uint32_t>(cols), static_cast<uint32_t>(part.n_tiles), format});
  }
}

void DeviceWeights::finish() {
  host_.check_complete(
      [this](const Weights::Slot& slot) { return slot.matrix ? has(*slot.matrix) : !slot.vector->empty(); });
  const auto keep_vector = [this](const std::vector<float>& values) {
    if (values.empty() || vectors_.count(&values) > 0) return;
    vectors_[&values] = static_cast<const float*>(keep(values.data(), values.size() * sizeof(float)));
  };
  for (size_t i = 0; i < n_layers_; ++i) keep_norms(host_.layer(i).ssm_norm);
  for (const auto& [name, slot] : host_.slots()) {
    if (slot.vector) keep_vector(*slot.vector);
  }
  for (size_t i = 0; i < n_layers_; ++i) {  // not of the file
    keep_vector(host_.layer(i).delta_q_scale);
    keep_vector(host_.layer(i).delta_k_scale);
    list_heads(host_.layer(i).attn_k_b);
    list_heads(host_.layer(i).attn_v_b);
  }
  token_embd_ = make_table(matrices_.at(&host_.token_embd()));
  std::vector<DeviceMatrix> inputs;
  for (const PackedMatrix& part : host_.token_inputs()) {
    inputs.insert(inputs.end(), parts(part).begin(), parts(part).end());
  }
  if (!inputs.empty()) token_inputs_ = make_table(inputs);
  staging_ = DeviceBuffer();
}

// Of groups: one after the other.
void DeviceWeights::keep_norms(const std::vector<std::vector<float>>& norms) {
  std::vector<float> all;
  for (const std::vector<float>& norm : norms) all.insert(all.end(), norm.begin(), norm.end());
  if (all.empty()) return;
  const auto* next = static_cast<const float*>(keep(all.data(), all.size() * sizeof(float)));
  for (const std::vector<float>& norm : norms) {
    vectors_[&norm] = next;
    next += norm.size();
  }
}

DeviceTable DeviceWeights::make_table(const std::vector<DeviceMatrix>& parts) {
  const void* const there = keep(parts.data(), parts.size() * sizeof(DeviceMatrix));
  return {static_cast<const DeviceMatrix*>(there), parts[0].n_out};
}

void DeviceWeights::list_heads(const std::vector<PackedMatrix>& names) {
  if (names.empty()) return;
  const std::vector<DeviceMatrix>& first = parts(names[0]);
  for (const PackedMatrix& name : names) {
    EH2O_CHECK(format(name) == first[0].format, "matrices of the heads of a layer differ in their types");
  }
  for (size_t part = 0; part < first.size(); ++part) {
    std::vector<DeviceMatrix> list;
    for (const PackedMatrix& name : names) list.push_back(parts(name)[part]);
    const void* const there = keep(list.data(), list.size() * sizeof(DeviceMatrix));
    heads_[&names].push_back({static_cast<const DeviceMatrix*>(there), first[part]});
  }
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
