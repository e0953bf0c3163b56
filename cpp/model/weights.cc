#include "model/weights.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/check.h"
#include "base/parallel.h"
#include "model/key_balance.h"

namespace edgeh2o {
namespace {

// Of convolutions that the file has one by one: every tap of all channels together.
void join_convolutions(LayerWeights& layer) {
  const size_t n_channels = layer.delta_bias.size();
  if (layer.conv_parts[0].empty()) return;
  layer.conv.clear();
  for (size_t begin = 0; begin < layer.conv_parts[0].size(); begin += n_channels) {
    for (const std::vector<float>& part : layer.conv_parts) {
      layer.conv.insert(layer.conv.end(), part.begin() + begin, part.begin() + begin + n_channels);
    }
  }
}

// Queries to keys that another model has cached by factors are divided by these, powers of two.
void undo_key_factors(const LayerSpec& spec, const std::vector<float>& factors, LayerWeights& layer) {
  if (factors.empty()) return;
  const size_t key_dim = spec.heads.key_dim, group_size = spec.heads.group_size();
  layer.query_gains.clear();
  for (size_t head = 0; head < spec.heads.n_heads; ++head) {
    const size_t first = head / group_size * key_dim;
    for (size_t i = 0; i < key_dim; ++i) {
      layer.query_gains.push_back(1.0f / factors[(first + i) % factors.size()]);
    }
  }
}

// One for every number of a query.
void spread_gains(const LayerSpec& spec, LayerWeights& layer) {
  if (layer.head_gains.empty()) return;
  layer.query_gains.clear();
  for (const float gain : layer.head_gains) {
    layer.query_gains.insert(layer.query_gains.end(), spec.heads.key_dim, gain);
  }
}

}  // namespace

const Weights::Slot& Weights::find_slot(const std::string& name, size_t rows, size_t cols) const {
  const auto found = slots_.find(name);
  EH2O_CHECK(found != slots_.end(), "tensor '", name, "' is not part of this model");
  const Slot& slot = found->second;
  EH2O_CHECK(rows == slot.rows && cols == slot.cols, "tensor '", name, "' is ", rows, " x ", cols,
             ", expected ", slot.rows, " x ", slot.cols);
  return slot;
}

void Weights::set_tensor(const std::string& name, const std::string& type_name, const uint8_t* data,
                         size_t n_bytes, size_t rows, size_t cols, const int32_t* row_order) {
  const Slot& slot = find_slot(name, rows, cols);
  const HeldTensor held(type_name, data, n_bytes);
  const FormatInfo& info = held.info();
  if (slot.is_transposed) {
    EH2O_CHECK(!row_order, "the rows of tensor '", name, "' have no order of their own");
    const TransposedTensor transposed(held, rows, cols);
    set_matrix(*slot.matrix, transposed.info(), transposed.data(), transposed.n_bytes(), cols, rows, nullptr);
    return;
  }
  if (slot.matrix) {
    return set_matrix(*slot.matrix, info, held.data(), held.n_bytes(), rows, cols, row_order);
  }
  EH2O_CHECK(!info.is_quantised, "vector '", name, "' has the quantised type ", type_name);
  const PackedMatrix source(info, 1, false, held.data(), held.n_bytes(), rows, cols, nullptr);
  std::vector<float> values(cols);
  n_bytes_ += (rows * cols - slot.vector->size()) * sizeof(float);
  slot.vector->resize(rows * cols);
  for (size_t row = 0; rows > 1 && row < rows; ++row) {
    source.dequantize_row(values.data(), row);
    for (size_t i = 0; i < cols; ++i) (*slot.vector)[slot.index(row, i)] = values[i];
  }
  if (rows > 1) return;
  source.dequantize_row(values.data(), 0);
  for (size_t i = 0; i < cols; ++i) {
    EH2O_CHECK(!row_order || (row_order[i] >= 0 && static_cast<size_t>(row_order[i]) < cols), "row_order[", i,
               "] of '", name, "' is outside the ", cols, " elements");
    (*slot.vector)[i] = values[row_order ? static_cast<size_t>(row_order[i]) : i];
  }
}

size_t Weights::rows_at_once(const std::string& name, size_t n_bytes, size_t rows, size_t cols,
                             const int32_t* row_order, size_t max_bytes) const {
  const Slot& slot = find_slot(name, rows, cols);
  const size_t panel_cols = table_->layout.panel_cols;
  if (!slot.matrix || slot.is_transposed || row_order || n_bytes % rows != 0) return rows;
  const size_t panel_bytes = std::max<size_t>(1, n_bytes / rows * panel_cols);
  return std::min(rows, std::max<size_t>(1, max_bytes / panel_bytes) * panel_cols);
}

void Weights::set_rows(const std::string& name, const std::string& type_name, const uint8_t* data,
                       size_t n_bytes, size_t rows, size_t cols, size_t first, size_t n_rows) {
  PackedMatrix& matrix = *find_slot(name, rows, cols).matrix;
  const HeldTensor held(type_name, data, n_bytes);
  const FormatInfo& info = held.info();
  check_tensor_data(info, held.n_bytes(), n_rows, cols, nullptr);
  if (first == 0) {
    n_bytes_ -= matrix.n_bytes();
    matrix = PackedMatrix(info, table_->layout.panel_cols, table_->layout.is_signed(info.format), rows, cols,
                          &pool_);
    n_bytes_ += matrix.n_bytes();
  }
  matrix.pack_rows(info, held.data(), first, n_rows);
}

void Weights::set_matrix(PackedMatrix& matrix, const FormatInfo& info, const uint8_t* data, size_t n_bytes,
                         size_t rows, size_t cols, const int32_t* row_order) {
  n_bytes_ -= matrix.n_bytes();
  matrix = PackedMatrix(info, table_->layout.panel_cols, table_->layout.is_signed(info.format), data, n_bytes,
                        rows, cols, row_order, &pool_);
  n_bytes_ += matrix.n_bytes();
}

void Weights::add_update(const std::string& name, size_t adapter, size_t rank, const Floats& a,
                         const Floats& b) {
  const auto found = slots_.find(name);
  const auto is_table = [&](const PackedMatrix* matrix) {  // whose rows are looked up
    return matrix == &token_embd_.weight || matrix == &position_embd_ ||
           std::any_of(token_inputs_.begin(), token_inputs_.end(),
                       [&](const PackedMatrix& part) { return matrix == &part; });
  };
  const bool is_multiplied = found != slots_.end() && found->second.matrix && !found->second.is_transposed &&
                             !is_table(found->second.matrix);
  EH2O_CHECK(is_multiplied, "tensor '", name, "' is no matrix that takes a low-rank update");
  PackedMatrix& matrix = *found->second.matrix;
  EH2O_CHECK(matrix, "tensor '", name, "' is not set");
  const size_t n_adapters = config_.adapter_scales.size();
  EH2O_CHECK(adapter < n_adapters, "the update of '", name, "' is of adapter ", adapter, " of ", n_adapters);
  size_t sum = rank;
  LowRankUpdates& updates = updates_[&matrix];
  for (const LowRankUpdate& before : updates) {
    EH2O_CHECK(before.adapter < adapter, "adapter ", before.adapter, " has updated '", name, "' already");
    sum += before.a.rows();
  }
  EH2O_CHECK(rank > 0 && sum <= config_.update_rank, "the updates of '", name, "' have rank ", sum,
             ", of 1 to ", config_.update_rank);
  const auto pack = [&](const Floats& values, size_t rows, size_t cols) {
    const FormatInfo& info = find_format(values.type_name);
    EH2O_CHECK(!info.is_quantised, "the update of '", name, "' has the quantised type ", values.type_name);
    return PackedMatrix(info, table_->layout.panel_cols, false, values.data.data, values.data.size, rows,
                        cols, nullptr, &pool_);
  };
  LowRankUpdate update{adapter, pack(a, rank, matrix.cols()), pack(b, matrix.rows(), rank)};
  n_bytes_ += update.a.n_bytes() + update.b.n_bytes();
  updates.push_back(std::move(update));
  matrix.set_updates(&updates);
}

std::vector<float> Weights::dequantize(const std::string& name, size_t* rows, size_t* cols) const {
  const auto found = slots_.find(name);
  EH2O_CHECK(found != slots_.end(), "tensor '", name, "' is not part of this model");
  const Slot& slot = found->second;
  EH2O_CHECK(slot.matrix ? static_cast<bool>(*slot.matrix) : !slot.vector->empty(), "tensor '", name,
             "' is not set");
  *rows = slot.rows;
  *cols = slot.cols;
  if (slot.vector && slot.rows == 1) return *slot.vector;
  std::vector<float> values(slot.rows * slot.cols);
  for (size_t i = 0; slot.vector && i < values.size(); ++i) {
    values[i] = (*slot.vector)[slot.index(i / slot.cols, i % slot.cols)];
  }
  if (slot.vector) return values;
  if (slot.is_transposed) {
    std::vector<float> column(slot.rows);
    for (size_t col = 0; col < slot.cols; ++col) {
      slot.matrix->dequantize_row(column.data(), col);
      for (size_t row = 0; row < slot.rows; ++row) values[row * slot.cols + col] = column[row];
    }
    return values;
  }
  for (size_t row = 0; row < slot.rows; ++row) {
    slot.matrix->dequantize_row(values.data() + row * slot.cols, row);
  }
  return values;
}

void Weights::set_ngram_rows(RowTable table) {
  EH2O_CHECK(!config_.ngrams.is_none() && table.rows() == config_.ngrams.n_rows &&
                 table.cols() == config_.ngrams.row_dim,
             "a table of ", table.rows(), " x ", table.cols(), " is not that of the model's n-grams, of ",
             config_.ngrams.n_rows, " x ", config_.ngrams.row_dim);
  ngram_rows_ = std::move(table);
}

void Weights::finish() {
  check_complete();
  EH2O_CHECK(config_.ngrams.is_none() || ngram_rows_, "the table of the n-grams is missing");
  if (main_ && !config_.joins(HiddenJoin::kPlain)) {
    EH2O_CHECK(main_->output(), "the model of a layer that guesses tokens ahead has no weights yet");
    const bool has_both = token_embd_.weight && (output_.weight || config_.joins(HiddenJoin::kCached));
    EH2O_CHECK(has_both || main_->config_.model_dim == config_.model_dim,
               "what guesses tokens ahead has the width ", config_.model_dim,
               " and no matrices of its own, its model ", main_->config_.model_dim);
    const bool is_own = token_embd_.weight && config_.joins(HiddenJoin::kCached);
    if (!output_.weight && !is_own) head_ = main_->output().first_rows(config_.n_outputs());
  }
  for (size_t i = 0; i < layers_.size(); ++i) {
    join_convolutions(layers_[i]);
    const LayerSpec& spec = config_.layers[config_.first_use(i)];
    spread_gains(spec, layers_[i]);
    if (spec.heads.are_lent) undo_key_factors(spec, main_->layer(spec.lender).key_factors, layers_[i]);
  }
  plan_reads();
  parallel_for(layers_.size(),
               [&](size_t i, size_t) { balance_keys(config_, config_.first_use(i), layers_[i]); });
}

bool Weights::balances_keys() const {
  return std::any_of(layers_.begin(), layers_.end(),
                     [](const LayerWeights& layer) { return layer.has_even_keys; });
}

void Weights::check_complete(const std::function<bool(const Slot&)>& is_filled) const {
  const size_t input_dim = config_.token_input_dim();
  const bool is_quantised = !token_inputs_.empty() && token_inputs_[0].is_quantised();
  EH2O_CHECK(!is_quantised || input_dim % PackedMatrix::kRangeStep == 0, "inputs per token of ", input_dim,
             " numbers cannot be quantised: only multiples of ", PackedMatrix::kRangeStep, " can");
  const auto is_filled_here = [](const Slot& slot) {
    return slot.matrix ? static_cast<bool>(*slot.matrix) : !slot.vector->empty();
  };
  std::vector<std::string> missing;
  for (const auto& [name, slot] : slots_) {
    const bool is_there = is_filled ? is_filled(slot) : is_filled_here(slot);
    if (slot.is_required && !is_there) missing.push_back(name);
  }
  if (missing.empty()) return;
  std::sort(missing.begin(), missing.end());
  std::string names = missing[0];
  for (size_t i = 1; i < std::min<size_t>(missing.size(), 5); ++i) names += ", " + missing[i];
  throw_invalid(missing.size(), " tensors are missing: ", names, missing.size() > 5 ? ", ..." : "");
}

}  // namespace edgeh2o
