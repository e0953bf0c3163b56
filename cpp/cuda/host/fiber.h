// Stacks to switch between. Switching by swapcontext alone takes a system call, which is most of the time of
// an emulated kernel, and more where AddressSanitizer intercepts it; hence a few instructions of our own.
#pragma once

#include <ucontext.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define EH2O_FIBER_ASAN 1
#else
#define EH2O_FIBER_ASAN 0
#endif

#if defined(__x86_64__)
#define EH2O_FIBER_ASSEMBLY 1
#else
#define EH2O_FIBER_ASSEMBLY 0
#endif

namespace edgeh2o::cuda::host {

class Fiber {
 public:
  // Makes the next switch to this fiber begin with entry(argument), which must not return.
  void prepare(void (*entry)(void*), void* argument);

  // Goes from this fiber, the one that runs, to another.
  void switch_to(Fiber& next);
  // Once, first of all, in a fiber that was switched to for the first time.
  void arrived_from(Fiber& previous);

 private:
  static constexpr size_t kStackBytes = EH2O_FIBER_ASAN ? 256 * 1024 : 64 * 1024;

  uint8_t* make_stack();
  void switch_stack(Fiber& next);

  std::unique_ptr<uint8_t[]> stack_;
#if EH2O_FIBER_ASSEMBLY
  void* top_ = nullptr;
#else
  ucontext_t context_;
#endif
#if EH2O_FIBER_ASAN
  const void* bottom_ = nullptr;
  size_t n_bytes_ = 0;
  void* fake_stack_ = nullptr;
#endif
};

// Memory that must not be touched; nothing without AddressSanitizer.
inline void poison([[maybe_unused]] const void* data, [[maybe_unused]] size_t n_bytes) {
#if EH2O_FIBER_ASAN
  __asan_poison_memory_region(data, n_bytes);
#endif
}
inline void unpoison([[maybe_unused]] const void* data, [[maybe_unused]] size_t n_bytes) {
#if EH2O_FIBER_ASAN
  __asan_unpoison_memory_region(data, n_bytes);
#endif
}

}  // namespace edgeh2o::cuda::host
