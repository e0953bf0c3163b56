// State as bytes, for session files: plain values and arrays in the machine's own layout.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "base/check.h"
#include "base/mat_view.h"

namespace edgeh2o {

class ByteWriter {
 public:
  template <typename T>
  void put(const T& value) {
    put_array(&value, 1);
  }
  template <typename T>
  void put_array(const T* values, size_t count) {
    static_assert(std::is_arithmetic_v<T>);
    const auto* bytes = reinterpret_cast<const uint8_t*>(values);
    bytes_.insert(bytes_.end(), bytes, bytes + count * sizeof(T));
  }
  const std::vector<uint8_t>& bytes() const { return bytes_; }

 private:
  std::vector<uint8_t> bytes_;
};

// The bytes may come from anywhere: reading past their end throws std::invalid_argument.
class ByteReader {
 public:
  explicit ByteReader(Span<const uint8_t> bytes) : bytes_(bytes) {}

  template <typename T>
  T take() {
    T value;
    take_array(&value, 1);
    return value;
  }
  // Reads a value that may be at most `largest`; `name` says in the error what it is.
  template <typename T>
  T take_at_most(T largest, const char* name) {
    const T value = take<T>();
    // Bytes as numbers, not as characters.
    EH2O_CHECK(value <= largest, name, " is ", +value, ", at most ", +largest, " is possible");
    return value;
  }
  template <typename T>
  void take_array(T* out, size_t count) {
    static_assert(std::is_arithmetic_v<T>);
    EH2O_CHECK(count <= (bytes_.size - used_) / sizeof(T), "the saved state ends after ", bytes_.size,
               " bytes, in the middle of a value");
    if (count > 0) std::memcpy(out, bytes_.data + used_, count * sizeof(T));
    used_ += count * sizeof(T);
  }
  // A reader of the next n_bytes.
  ByteReader take_part(size_t n_bytes) {
    EH2O_CHECK(n_bytes <= bytes_.size - used_, "the saved state ends after ", bytes_.size,
               " bytes, in the middle of a part");
    used_ += n_bytes;
    return ByteReader({bytes_.data + used_ - n_bytes, n_bytes});
  }
  void check_end() const {
    EH2O_CHECK(used_ == bytes_.size, "the saved state has ", bytes_.size - used_, " bytes too many");
  }

 private:
  Span<const uint8_t> bytes_;
  size_t used_ = 0;
};

}  // namespace edgeh2o
