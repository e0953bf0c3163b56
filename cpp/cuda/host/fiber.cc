#include "cuda/host/fiber.h"

#if !EH2O_FIBER_ASSEMBLY
#include <ucontext.h>
#endif

namespace edgeh2o::cuda::host {

#if EH2O_FIBER_ASSEMBLY

extern "C" void edgeh2o_enter_fiber();
asm(R"(
.text
.globl edgeh2o_enter_fiber
.hidden edgeh2o_enter_fiber
.type edgeh2o_enter_fiber, @function
edgeh2o_enter_fiber:
  popq %rdi
  popq %rbx
  callq *%rbx
  ud2
.size edgeh2o_enter_fiber, .-edgeh2o_enter_fiber
)");

void Fiber::prepare(void (*entry)(void*), void* argument) {
  auto* top =
      reinterpret_cast<void**>((reinterpret_cast<uintptr_t>(make_stack()) + kStackBytes) & ~uintptr_t{15});
  *--top = nullptr;  // keeps the call aligned
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(entry);
  *--top = argument;
  *--top = reinterpret_cast<void*>(&edgeh2o_enter_fiber);
  top_ = top;
}

#else

struct Fiber::Context {
  ucontext_t saved;
};

namespace {

// makecontext passes integers only.
void enter_context(unsigned entry_low, unsigned entry_high, unsigned argument_low, unsigned argument_high) {
  const auto join = [](unsigned low, unsigned high) { return uint64_t{high} << 32 | low; };
  const auto entry = reinterpret_cast<void (*)(void*)>(join(entry_low, entry_high));
  entry(reinterpret_cast<void*>(join(argument_low, argument_high)));
}

}  // namespace

void Fiber::prepare(void (*entry)(void*), void* argument) {
  uint8_t* const stack = make_stack();
  if (!context_) context_ = std::make_shared<Context>();
  ucontext_t& context = context_->saved;
  getcontext(&context);
  context.uc_stack.ss_sp = stack;
  context.uc_stack.ss_size = kStackBytes;
  context.uc_link = nullptr;
  const auto a = reinterpret_cast<uint64_t>(entry), b = reinterpret_cast<uint64_t>(argument);
  makecontext(&context, reinterpret_cast<void (*)()>(&enter_context), 4, static_cast<unsigned>(a),
              static_cast<unsigned>(a >> 32), static_cast<unsigned>(b), static_cast<unsigned>(b >> 32));
}

void Fiber::switch_stack(Fiber& next) {
  if (!context_) context_ = std::make_shared<Context>();  // of a thread
  swapcontext(&context_->saved, &next.context_->saved);
}

#endif

uint8_t* Fiber::make_stack() {
  if (!stack_) stack_.reset(new uint8_t[kStackBytes]);
#if EH2O_FIBER_ASAN
  unpoison(stack_.get(), kStackBytes);
  bottom_ = stack_.get();
  n_bytes_ = kStackBytes;
  fake_stack_ = nullptr;
#endif
  return stack_.get();
}

void Fiber::arrived_from([[maybe_unused]] Fiber* thread) {
#if EH2O_FIBER_ASAN
  __sanitizer_finish_switch_fiber(nullptr, thread ? &thread->bottom_ : nullptr,
                                  thread ? &thread->n_bytes_ : nullptr);
#endif
}

}  // namespace edgeh2o::cuda::host
