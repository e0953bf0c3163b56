// Stacks to switch between. Switching by swapcontext alone takes a system call, which is most of the time of
// an emulated kernel, and more where AddressSanitizer intercepts it; hence a few instructions of our own.
#pragma once

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
  // Once, first of all, in a fiber that was switched to for the first time. From one that was not prepared,
  // the stack of a thread, if it is named.
  void arrived_from(Fiber* thread);

 private:
  // Past a power of two: tops of stacks must not all fall into the same sets of the caches, which took an
  // eighth of the time of a kernel.
  static constexpr size_t kStackBytes = (EH2O_FIBER_ASAN ? 256 * 1024 : 64 * 1024) + 4096 + 320;

  uint8_t* make_stack();
  void switch_stack(Fiber& next);

  std::unique_ptr<uint8_t[]> stack_;
#if EH2O_FIBER_ASSEMBLY
  void* top_ = nullptr;
#else
  struct Context;  // of ucontext.h, which macOS refuses to whoever includes this header for its types
  std::shared_ptr<Context> context_;
#endif
#if EH2O_FIBER_ASAN
  const void* bottom_ = nullptr;
  size_t n_bytes_ = 0;
  void* fake_stack_ = nullptr;
#endif
};

#if EH2O_FIBER_ASSEMBLY
inline void Fiber::switch_stack(Fiber& next) {
  // In place and by jumps: a processor guesses where a return goes by the calls before, wrongly after a
  // change of stacks. By a call and a return, emulated kernels took twice as long.
  void** from = &top_;
  void* to = next.top_;
  asm volatile(
      "leaq -128(%%rsp), %%rsp\n"  // past the red zone
      "pushq %%rbp\n"
      "leaq 1f(%%rip), %%rax\n"
      "pushq %%rax\n"
      "movq %%rsp, (%0)\n"
      "movq %1, %%rsp\n"
      "popq %%rax\n"
      "jmpq *%%rax\n"
      "1: popq %%rbp\n"
      "leaq 128(%%rsp), %%rsp\n"
      : "+D"(from), "+S"(to)
      :
      : "rax", "rbx", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "xmm0", "xmm1",
        "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13",
        "xmm14", "xmm15", "cc", "memory");
}
#endif

inline void Fiber::switch_to(Fiber& next) {
#if EH2O_FIBER_ASAN
  __sanitizer_start_switch_fiber(&fake_stack_, next.bottom_, next.n_bytes_);
#endif
  switch_stack(next);
#if EH2O_FIBER_ASAN
  __sanitizer_finish_switch_fiber(fake_stack_, nullptr, nullptr);
#endif
}

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
