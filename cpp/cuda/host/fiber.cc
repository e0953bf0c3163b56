#include "cuda/host/fiber.h"

namespace edgeh2o::cuda::host {

#if EH2O_FIBER_ASSEMBLY

// Saves what a call must keep, changes the stack, and returns on the other one.
extern "C" void edgeh2o_switch_stack(void** from, void* to);
extern "C" void edgeh2o_enter_fiber();
asm(R"(
.text
.globl edgeh2o_switch_stack
.hidden edgeh2o_switch_stack
.type edgeh2o_switch_stack, @function
edgeh2o_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size edgeh2o_switch_stack, .-edgeh2o_switch_stack
.globl edgeh2o_enter_fiber
.hidden edgeh2o_enter_fiber
.type edgeh2o_enter_fiber, @function
edgeh2o_enter_fiber:
  movq %r12, %rdi
  callq *%rbx
  ud2
.size edgeh2o_enter_fiber, .-edgeh2o_enter_fiber
)");

void Fiber::prepare(void (*entry)(void*), void* argument) {
  auto* top =
      reinterpret_cast<void**>((reinterpret_cast<uintptr_t>(make_stack()) + kStackBytes) & ~uintptr_t{15});
  *--top = reinterpret_cast<void*>(&edgeh2o_enter_fiber);
  *--top = nullptr;                              // rbp
  *--top = reinterpret_cast<void*>(entry);       // rbx
  *--top = argument;                             // r12
  for (int i = 0; i < 3; ++i) *--top = nullptr;  // r13 to r15
  top_ = top;
}

void Fiber::switch_stack(Fiber& next) { edgeh2o_switch_stack(&top_, next.top_); }

#else

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
  getcontext(&context_);
  context_.uc_stack.ss_sp = stack;
  context_.uc_stack.ss_size = kStackBytes;
  context_.uc_link = nullptr;
  const auto a = reinterpret_cast<uint64_t>(entry), b = reinterpret_cast<uint64_t>(argument);
  makecontext(&context_, reinterpret_cast<void (*)()>(&enter_context), 4, static_cast<unsigned>(a),
              static_cast<unsigned>(a >> 32), static_cast<unsigned>(b), static_cast<unsigned>(b >> 32));
}

void Fiber::switch_stack(Fiber& next) { swapcontext(&context_, &next.context_); }

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

void Fiber::switch_to(Fiber& next) {
#if EH2O_FIBER_ASAN
  __sanitizer_start_switch_fiber(&fake_stack_, next.bottom_, next.n_bytes_);
#endif
  switch_stack(next);
#if EH2O_FIBER_ASAN
  __sanitizer_finish_switch_fiber(fake_stack_, nullptr, nullptr);
#endif
}

void Fiber::arrived_from([[maybe_unused]] Fiber& previous) {
#if EH2O_FIBER_ASAN
  __sanitizer_finish_switch_fiber(nullptr, &previous.bottom_, &previous.n_bytes_);
#endif
}

}  // namespace edgeh2o::cuda::host
