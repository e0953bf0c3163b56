// Reads tensors from an open file and packs them: one call for a whole file, without Python in between.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "model/weights.h"

namespace edgeh2o {

// Where a file keeps one weight of the decoder: n_bytes from `offset` on. The rest as in Weights::set_tensor.
struct TensorSource {
  std::string name, type_name;
  uint64_t offset;
  size_t n_bytes, rows, cols;
  const int32_t* row_order;
};

// Takes the bytes of a tensor, which are gone afterwards.
struct TensorSink {
  std::function<void(const TensorSource&, const uint8_t* data)> set_tensor;
  // Null where tensors are taken whole. How many rows at once, about max_bytes; and `n_rows` from row `first`
  // on, n_bytes.
  std::function<size_t(const TensorSource&, size_t max_bytes)> rows_at_once = {};
  std::function<void(const TensorSource&, const uint8_t* data, size_t n_bytes, size_t first, size_t n_rows)>
      set_rows = {};
};

enum class ReadStatus { kDone, kCancelled, kFileTooShort, kReadError };

class WeightReader {
 public:
  WeightReader(TensorSink sink, int descriptor, std::vector<TensorSource> sources)
      : sink_(std::move(sink)), descriptor_(descriptor), sources_(std::move(sources)) {}

  // Reads and packs everything, one tensor, or some MiB of one, at a time. For kReadError `error_number` says
  // why. Throws what the sink does: std::invalid_argument for what Weights::set_tensor refuses,
  // std::bad_alloc. One thread less than there are is used, so that another thread can work beside it
  // undisturbed, until that calls take_all_threads.
  ReadStatus run();
  void take_all_threads() { spares_thread_.store(false, std::memory_order_relaxed); }
  // From another thread: run() ends after the tensor at hand.
  void cancel() { is_cancelled_.store(true, std::memory_order_relaxed); }

  size_t n_bytes_done() const { return n_bytes_done_.load(std::memory_order_relaxed); }
  int error_number() const { return error_number_; }

 private:
  ReadStatus read(uint8_t* out, uint64_t offset, size_t n_bytes);

  TensorSink sink_;
  int descriptor_;
  std::vector<TensorSource> sources_;
  std::atomic<bool> is_cancelled_{false}, spares_thread_{true};
  std::atomic<size_t> n_bytes_done_{0};
  int error_number_ = 0;
};

}  // namespace edgeh2o
