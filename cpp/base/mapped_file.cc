#include "base/mapped_file.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <system_error>

namespace edgeh2o {

MappedFile::MappedFile(int descriptor) {
  struct stat status;
  if (fstat(descriptor, &status) != 0) throw std::system_error(errno, std::generic_category());
  const auto n_bytes = static_cast<size_t>(status.st_size);
  void* memory = mmap(nullptr, n_bytes, PROT_READ, MAP_SHARED, descriptor, 0);
  if (memory == MAP_FAILED) throw std::system_error(errno, std::generic_category());
  madvise(memory, n_bytes, MADV_WILLNEED);  // what is not cached is read ahead, in one go
  data_ = static_cast<const uint8_t*>(memory);
  n_bytes_ = n_bytes;
}

MappedFile::~MappedFile() {
  if (data_) munmap(const_cast<uint8_t*>(data_), n_bytes_);
}

}  // namespace edgeh2o
