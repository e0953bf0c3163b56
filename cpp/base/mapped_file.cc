#include "base/mapped_file.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

namespace edgeh2o {
namespace {

// Of one call: Linux reads no more than a request to the disk takes, and forgets the rest (1.25 MiB on many).
constexpr size_t kRequestBytes = size_t{1} << 20;

}  // namespace

MappedFile::MappedFile(int descriptor) {
  struct stat status;
  if (fstat(descriptor, &status) != 0) throw std::system_error(errno, std::generic_category());
  const auto n_bytes = static_cast<size_t>(status.st_size);
  void* memory = mmap(nullptr, n_bytes, PROT_READ, MAP_SHARED, descriptor, 0);
  if (memory == MAP_FAILED) throw std::system_error(errno, std::generic_category());
  data_ = static_cast<const uint8_t*>(memory);
  n_bytes_ = n_bytes;
}

MappedFile::~MappedFile() {
  if (data_) munmap(const_cast<uint8_t*>(data_), n_bytes_);
}

void MappedFile::will_need(const uint8_t* begin, size_t n_bytes) const {
  static const auto page_bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t offset = static_cast<size_t>(begin - data_), end = offset + n_bytes;
  for (size_t at = offset / page_bytes * page_bytes; at < end; at += kRequestBytes) {
    madvise(const_cast<uint8_t*>(data_) + at, std::min(kRequestBytes, end - at), MADV_WILLNEED);
  }
}

}  // namespace edgeh2o
