// Weights that lie in a file of packed matrices.
#include <cerrno>
#include <cstdio>
#include <system_error>
#include <utility>

#include "base/check.h"
#include "base/read_file.h"
#include "model/weights.h"

namespace edgeh2o {

const PackedMatrix& Weights::find_packed(const std::string& name) const {
  const auto found = slots_.find(name);
  EH2O_CHECK(found != slots_.end() && found->second.matrix && *found->second.matrix, "tensor '", name,
             "' is no matrix that was set");
  return *found->second.matrix;
}

void Weights::map_packed(MappedFile file, const std::vector<PackedTensor>& tensors, bool is_beyond_memory) {
  std::vector<std::pair<PackedMatrix*, PackedMatrix>> mapped;
  for (const PackedTensor& tensor : tensors) {
    const auto found = slots_.find(tensor.name);
    EH2O_CHECK(found != slots_.end() && found->second.matrix, "tensor '", tensor.name,
               "' is no matrix of this model");
    const Slot& slot = found->second;
    const size_t rows = slot.is_transposed ? slot.cols : slot.rows;
    const size_t cols = slot.is_transposed ? slot.rows : slot.cols;
    EH2O_CHECK(tensor.rows == rows && tensor.cols == cols, "matrix '", tensor.name, "' is ", tensor.rows,
               " x ", tensor.cols, ", expected ", rows, " x ", cols);
    const FormatInfo& info = find_format(tensor.packed_type);
    const bool is_held =
        slot.is_transposed ? !info.is_quantised : &info == &find_held_format(tensor.tensor_type);
    EH2O_CHECK(is_held, "matrix '", tensor.name, "' of type ", tensor.tensor_type, " is not held as ",
               tensor.packed_type);
    EH2O_CHECK(tensor.offset <= file.size() && tensor.offset % kAlignment == 0, "matrix '", tensor.name,
               "' cannot begin at byte ", tensor.offset, " of ", file.size());
    PackedMatrix matrix(info, table_->layout.panel_cols, table_->layout.is_signed(info.format), rows, cols,
                        file.data() + tensor.offset);
    EH2O_CHECK(matrix.n_bytes() <= file.size() - tensor.offset, "matrix '", tensor.name, "' ends behind the ",
               file.size(), " bytes of its file");
    mapped.emplace_back(slot.matrix, std::move(matrix));
  }
  for (auto& [place, matrix] : mapped) {
    n_bytes_ += matrix.n_bytes() - place->n_bytes();
    n_mapped_bytes_ += matrix.n_bytes();
    *place = std::move(matrix);
  }
  mapped_ = std::move(file);
  is_beyond_memory_ = is_beyond_memory;
}

void Weights::hold_packed(const std::string& name, int descriptor, uint64_t offset) {
  PackedMatrix& matrix = *slots_.at(name).matrix;
  const FormatInfo& info = format_info(matrix.format());
  PackedMatrix held(info, table_->layout.panel_cols, table_->layout.is_signed(info.format), matrix.rows(),
                    matrix.cols(), &pool_);
  const int error = read_file(descriptor, held.unfilled_panels(), offset, held.n_bytes());
  if (error != 0) throw std::system_error(error < 0 ? EIO : error, std::generic_category());
  n_mapped_bytes_ -= held.n_bytes();
  matrix = std::move(held);
}

void Weights::plan_reads() {
  if (n_mapped_bytes_ == 0) return;
  const size_t n_layers = config_.n_own_layers();
  read_ahead_ = std::make_unique<ReadAhead>(mapped_, n_layers, is_beyond_memory_);
  for (const auto& [name, slot] : slots_) {
    size_t layer = 0, expert = 0;
    if (!slot.matrix || std::sscanf(name.c_str(), "blk.%zu.", &layer) != 1) continue;
    const size_t place = name.find("_exps.");
    if (place == std::string::npos) {
      read_ahead_->add(layer, *slot.matrix);
    } else if (std::sscanf(name.c_str() + place, "_exps.%zu.", &expert) == 1) {
      read_ahead_->add_expert(layer, expert, *slot.matrix);
    }
  }
  if (output()) read_ahead_->add(n_layers, output());
}

}  // namespace edgeh2o
