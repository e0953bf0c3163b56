// Aligned memory. AlignedBuffer owns one block; Arena hands out pieces of one block that was sized
// beforehand, so that nothing is allocated after construction; BlockPool hands out pieces of blocks that it
// adds as it needs them. Memory comes zeroed from the kernel and untouched pages cost no RSS.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace edgeh2o {

inline constexpr size_t kAlignment = 64;

constexpr size_t round_up(size_t value, size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}
constexpr size_t ceil_div(size_t value, size_t divisor) { return (value + divisor - 1) / divisor; }

// Whether the system tells which pages of memory were written to: some sandboxes say that all were.
bool tells_resident_pages();

class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  explicit AlignedBuffer(size_t n_bytes);  // throws std::bad_alloc
  ~AlignedBuffer();
  AlignedBuffer(AlignedBuffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), n_bytes_(std::exchange(other.n_bytes_, 0)) {}
  AlignedBuffer& operator=(AlignedBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(n_bytes_, other.n_bytes_);
    return *this;
  }
  uint8_t* data() const { return data_; }
  size_t size() const { return n_bytes_; }
  // Before it is written to: a large block else comes in huge pages, of which one byte takes 2 MiB.
  void use_small_pages();
  // All of it is zero again, and takes no memory until it is written to.
  void drop_pages();
  // Of its pages those that are in memory; size() where the system does not tell.
  size_t resident_bytes() const;

 private:
  uint8_t* data_ = nullptr;
  size_t n_bytes_ = 0;
};

// Two passes over the same take() calls: the first, on an empty arena, only counts; the second hands out
// memory: the arena's own, or the caller's.
class Arena {
 public:
  Arena() = default;
  explicit Arena(uint8_t* memory) : base_(memory) {}
  template <typename T>
  T* take(size_t count) {
    const size_t offset = used_;
    used_ += round_up(count * sizeof(T), kAlignment);
    return base_ ? reinterpret_cast<T*>(base_ + offset) : nullptr;
  }
  // The memory of both passes of take_all(arena), in small pages: pieces are written as positions come.
  template <typename TakeAll>
  static Arena of(const TakeAll& take_all) {
    Arena arena;
    take_all(arena);
    arena.allocate();
    arena.use_small_pages();
    take_all(arena);
    return arena;
  }
  size_t used() const { return std::max(used_, most_); }
  // Where the next piece begins, and another place for it: pieces that are never needed together share one.
  size_t position() const { return used_; }
  void go_to(size_t position) {
    most_ = used();
    used_ = position;
  }
  void allocate() {
    buffer_ = AlignedBuffer(used());
    base_ = buffer_.data();
    used_ = most_ = 0;
  }
  void use_small_pages() { buffer_.use_small_pages(); }  // of its own memory
  void drop_pages() { buffer_.drop_pages(); }            // likewise
  size_t resident_bytes() const { return buffer_.resident_bytes(); }

 private:
  AlignedBuffer buffer_;
  uint8_t* base_ = nullptr;
  size_t used_ = 0;
  size_t most_ = 0;  // that was used before it went to another place
};

// For many pieces that live as long as each other. A block is large enough for huge pages: the weights of a
// model of 135M in buffers of their own take 16,000 page faults, half the time of packing them.
class BlockPool {
 public:
  uint8_t* take(size_t n_bytes);  // throws std::bad_alloc

 private:
  std::vector<AlignedBuffer> blocks_;
  size_t n_left_ = 0;  // of the last block
};

}  // namespace edgeh2o
