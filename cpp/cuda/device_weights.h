// The weights of a decoder on a device: read and named as Weights are, packed as tiles.
#pragma once

#include <string>
#include <unordered_map>
#include <vector>

#include "cuda/device.h"
#include "cuda/tiles.h"
#include "model/weights.h"

namespace edgeh2o::cuda {

// Parts of part_rows rows, but for the last; the list of them lies on the device.
struct DeviceTable {
  const DeviceMatrix* parts = nullptr;
  uint32_t part_rows = 0;
};

class DeviceWeights {
 public:
  // block_bytes: of the memory that is asked for at a time.
  DeviceWeights(const DecoderConfig& config, const KernelTable& table, Device& device, size_t block_bytes);

  // As Weights::set_tensor; the bytes go to the device in pieces. Throws DeviceError too.
  void set_tensor(const std::string& name, const std::string& type_name, const uint8_t* data, size_t n_bytes,
                  size_t rows, size_t cols, const int32_t* row_order);
  // Bytes that set_tensor will take of the device.
  static size_t estimate_bytes(const std::string& type_name, size_t rows, size_t cols);
  void expect(size_t n_bytes) { pool_.expect(n_bytes); }

  // Throws std::invalid_argument that lists the required tensors that are missing. Ends the loading.
  void finish();

  // The host's: vectors are filled, matrices are names for those of the device.
  const Weights& host() const { return host_; }
  // Parts of a matrix by rows, equal but for the last; one, unless it is larger than a block.
  const std::vector<DeviceMatrix>& parts(const PackedMatrix& name) const { return matrices_.at(&name); }
  WeightFormat format(const PackedMatrix& name) const { return parts(name)[0].format; }
  size_t n_out(const PackedMatrix& name) const;
  bool has(const PackedMatrix& name) const { return matrices_.count(&name) > 0; }
  // The matrices of all heads, parts by rows as above: lists on the device, and the first of each here.
  struct HeadParts {
    const DeviceMatrix* list;
    DeviceMatrix first;
  };
  const std::vector<HeadParts>& heads(const std::vector<PackedMatrix>& names) const {
    return heads_.at(&names);
  }
  // On the device, null for an empty one.
  const float* vector(const std::vector<float>& values) const;
  const std::vector<DeviceMatrix>& output() const {
    return parts(has(host_.own_output()) ? host_.own_output() : host_.token_embd());
  }
  // Tables that rows are looked up in.
  const DeviceTable& token_embd() const { return token_embd_; }
  const DeviceTable& token_inputs() const { return token_inputs_; }
  size_t n_bytes() const { return pool_.n_bytes(); }

 private:
  size_t rows_of_part(const PackedMatrix* matrix, WeightFormat format, size_t rows, size_t cols) const;
  // data: checked.
  void set_matrix(const PackedMatrix* matrix, const FormatInfo& info, const uint8_t* data, size_t rows,
                  size_t cols, const int32_t* row_order);
  void upload(void* to, const void* from, size_t n_bytes);
  void* keep(const void* data, size_t n_bytes);
  void keep_norms(const std::vector<std::vector<float>>& norms);
  DeviceTable make_table(const std::vector<DeviceMatrix>& parts);
  void list_heads(const std::vector<PackedMatrix>& names);

  Device& device_;
  size_t n_layers_, token_input_rows_;
  Weights host_;
  DevicePool pool_;
  DeviceBuffer staging_;  // pinned
  std::unordered_map<const PackedMatrix*, std::vector<DeviceMatrix>> matrices_;
  std::unordered_map<const std::vector<float>*, const float*> vectors_;
  std::unordered_map<const std::vector<PackedMatrix>*, std::vector<HeadParts>> heads_;
  DeviceTable token_embd_, token_inputs_;
};

}  // namespace edgeh2o::cuda
