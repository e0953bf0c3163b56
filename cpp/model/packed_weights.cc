// Weights that lie in a file of packed matrices.
#include <utility>

#include "base/check.h"
#include "model/weights.h"

namespace edgeh2o {

const PackedMatrix& Weights::find_packed(const std::string& name) const {
  const auto found = slots_.find(name);
  EH2O_CHECK(found != slots_.end() && found->second.matrix && *found->second.matrix, "tensor '", name,
             "' is no matrix that was set");
  return *found->second.matrix;
}

void Weights::map_packed(MappedFile file, const std::vector<PackedTensor>& tensors) {
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
}

}  // namespace edgeh2o
