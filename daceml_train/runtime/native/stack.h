// Stacks as large as a call needs, for calls in the thread that asks for them.
#pragma once

#include <cstdint>

#include <sys/mman.h>
#include <ucontext.h>

namespace daceml {

class Stack {
 public:
  // Address space of so many bytes, and a page or more that nobody may touch; `ok` says whether the system lent it.
  explicit Stack(int64_t bytes) : size_(static_cast<size_t>(bytes + guard)) {
    memory_ = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
    ok_ = memory_ != MAP_FAILED && mprotect(memory_, guard, PROT_NONE) == 0;
  }
  Stack(const Stack&) = delete;
  Stack& operator=(const Stack&) = delete;
  ~Stack() {
    if (memory_ != MAP_FAILED) munmap(memory_, size_);
  }

  bool ok() const { return ok_; }

  // The result of a C function, which must not throw: nothing unwinds from one stack to another.
  void* call(void* (*function)(void*), void* argument) const {
    Call call{function, argument};
    getcontext(&call.there);
    call.there.uc_stack.ss_sp = static_cast<char*>(memory_) + guard;
    call.there.uc_stack.ss_size = size_ - guard;
    call.there.uc_link = &call.here;
    makecontext(&call.there, &enter, 0);
    entering() = &call;
    swapcontext(&call.here, &call.there);
    return call.result;
  }

 private:
  struct Call {
    void* (*function)(void*);
    void* argument;
    void* result = nullptr;
    ucontext_t here{}, there{};
  };
  static constexpr int64_t guard = 64 << 10;

  static Call*& entering() {
    thread_local Call* call = nullptr;
    return call;
  }

  static void enter() {
    Call* call = entering();
    call->result = call->function(call->argument);
  }

  void* memory_;
  size_t size_;
  bool ok_;
};

}  // namespace daceml
