#include "base/arena.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <new>

#include "base/allocation_counter.h"

namespace edgeh2o {
namespace {
constexpr size_t kPoolBlockBytes = size_t{32} << 20;

#ifdef __linux__
using PageFlag = unsigned char;  // as mincore writes it
#else
using PageFlag = char;
#endif

size_t page_bytes() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }
}  // namespace

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
  if (!data_) return;
#ifdef __linux__
  madvise(data_, n_bytes_, MADV_DONTNEED);
#else  // where that may keep what was written
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
  if (mmap(data_, n_bytes_, PROT_READ | PROT_WRITE, flags, -1, 0) == MAP_FAILED) {
    std::fill_n(data_, n_bytes_, uint8_t{0});
  }
#endif
}

size_t AlignedBuffer::resident_bytes() const {
  if (!data_ || !tells_resident_pages()) return n_bytes_;
  const size_t page = page_bytes();
  std::array<PageFlag, 4096> flags;
  size_t n_pages = 0;
  for (size_t begin = 0; begin < n_bytes_; begin += flags.size() * page) {
    const size_t n = std::min(n_bytes_ - begin, flags.size() * page);
    if (mincore(data_ + begin, n, flags.data()) != 0) return n_bytes_;
    n_pages += static_cast<size_t>(std::count_if(flags.begin(), flags.begin() + ceil_div(n, page),
                                                 [](PageFlag flag) { return flag & 1; }));
  }
  return std::min(n_bytes_, n_pages * page);
}

bool tells_resident_pages() {
  static const bool tells = [] {
    const AlignedBuffer fresh(page_bytes());
    PageFlag flag = 1;
    return mincore(fresh.data(), fresh.size(), &flag) == 0 && (flag & 1) == 0;
  }();
  return tells;
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
