// A file in memory, for reading: its pages are those that the system caches, and no copy of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace edgeh2o {

class MappedFile {
 public:
  MappedFile() = default;
  // The file of an open descriptor, all of it as long as it is now; the descriptor may be closed afterwards.
  // It must not become shorter: whoever reads behind its end is killed. Throws std::system_error.
  explicit MappedFile(int descriptor);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), n_bytes_(std::exchange(other.n_bytes_, 0)) {}
  MappedFile& operator=(MappedFile&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(n_bytes_, other.n_bytes_);
    return *this;
  }
  const uint8_t* data() const { return data_; }
  size_t size() const { return n_bytes_; }
  bool holds(const uint8_t* begin) const {
    return n_bytes_ > 0 && begin >= data_ && begin < data_ + n_bytes_;
  }

  // Has n_bytes of it from `begin` on read from the disk, those that are not in memory, without waiting.
  void will_need(const uint8_t* begin, size_t n_bytes) const;

 private:
  const uint8_t* data_ = nullptr;
  size_t n_bytes_ = 0;
};

}  // namespace edgeh2o
