#include "base/allocation_counter.h"

#ifdef EH2O_DEBUG

#include <atomic>
#include <cstdlib>
#include <new>

namespace edgeh2o {
namespace {
std::atomic<uint64_t> g_allocations{0};

void* allocate(std::size_t n_bytes) {
  count_allocation();
  if (void* memory = std::malloc(n_bytes ? n_bytes : 1)) return memory;
  throw std::bad_alloc();
}
}  // namespace

uint64_t allocation_count() { return g_allocations.load(std::memory_order_relaxed); }
void count_allocation() { g_allocations.fetch_add(1, std::memory_order_relaxed); }

}  // namespace edgeh2o

void* operator new(std::size_t n_bytes) { return edgeh2o::allocate(n_bytes); }
void* operator new[](std::size_t n_bytes) { return edgeh2o::allocate(n_bytes); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }

#else

namespace edgeh2o {
uint64_t allocation_count() { return 0; }
void count_allocation() {}
}  // namespace edgeh2o

#endif
