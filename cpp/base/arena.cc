#include "base/arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>

#include "base/allocation_counter.h"

namespace edgeh2o {
namespace {
constexpr size_t kPoolBlockBytes = size_t{32} << 20;
}

AlignedBuffer::AlignedBuffer(size_t n_bytes) : n_bytes_(n_bytes) {
  if (n_bytes == 0) return;
  count_allocation();
  void* memory = mmap(nullptr, n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
  if (n_bytes >= (size_t{4} << 20)) madvise(memory, n_bytes, MADV_HUGEPAGE);
#endif
  data_ = static_cast<uint8_t*>(memory);
}

AlignedBuffer::~AlignedBuffer() {
  if (data_) munmap(data_, n_bytes_);
}

void AlignedBuffer::use_small_pages() {
#ifdef MADV_NOHUGEPAGE
  if (data_) madvise(data_, n_bytes_, MADV_NOHUGEPAGE);  // a kernel without huge pages has none to avoid
#endif
}

void AlignedBuffer::drop_pages() {
#ifdef __linux__
  if (data_) madvise(data_, n_bytes_, MADV_DONTNEED);  // elsewhere it may keep what was written
#endif
}

uint8_t* BlockPool::take(size_t n_bytes) {
  if (n_bytes == 0) return nullptr;  // like an empty AlignedBuffer; there may be no block yet
  n_bytes = round_up(n_bytes, kAlignment);
  if (n_bytes > n_left_) {
    blocks_.emplace_back(std::max(n_bytes, kPoolBlockBytes));
    n_left_ = blocks_.back().size();
  }
  uint8_t* piece = blocks_.back().data() + blocks_.back().size() - n_left_;
  n_left_ -= n_bytes;
  return piece;
}

}  // namespace edgeh2o
