// What calls of a compiled graph run: a forward and a backward program, for one set of sizes; and what they keep.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty_strided.h>
#include <torch/csrc/profiler/api.h>

#include "failure.h"
#include "plan.h"
#include "python_error.h"

namespace daceml {

// An output of a program: one of the plan's, or a view of it, which shares its memory with no other output.
struct Output {
  size_t position;
  bool is_view;
  std::vector<int64_t> sizes, strides;
  int64_t offset;

  at::Tensor of(const std::vector<at::Tensor>& owned) const {
    const at::Tensor& whole = owned[position];
    return is_view ? whole.as_strided(sizes, strides, offset) : whole;
  }
};

// What the calls of one set of sizes run.
struct Programs {
  Plan* forward = nullptr;
  Plan* backward = nullptr;                      // null: Python runs the backward pass
  std::vector<Output> forward_outputs, backward_outputs;
  std::vector<std::optional<std::vector<int64_t>>> copied;  // per result, the strides of its copy, if it is copied
  _object *told_forward = nullptr, *told_backward = nullptr;  // what is told the seconds of a run, if anything is
  _object *failed_forward = nullptr, *failed_backward = nullptr;  // what raises the error of a run, given its status
  // What is computed from inputs that seldom change: those, their fingerprint, and the operands that the forward program
  // takes instead of all inputs, each the position of an input, or an object.
  std::vector<int64_t> watched;
  uint64_t seen = 0;
  std::vector<std::pair<int64_t, _object*>> operands;
  _object* alive = nullptr;                      // owns all of these
  int threads = 1;
  int64_t epoch = 0;

  ~Programs() {
    const Interpreter lock;
    if (lock) Py_DecRef(alive);
  }
};

// Advances when programs are to run in Python again, as for a measurement.
inline std::atomic<int64_t>& epoch() {
  static std::atomic<int64_t> current{0};
  return current;
}

inline bool is_usual(const Programs& programs) {
  return programs.epoch == epoch().load(std::memory_order_relaxed) && programs.threads == at::get_num_threads() &&
         !torch::profiler::impl::profilerEnabled();
}

// The status of a run. After `mismatch` nothing has run, and Python is to run the program, with copies. After a failure
// memory may have been written: there is no other run, and `raise_failure` says why.
inline int run(Plan& plan, const std::vector<void*>& inputs, const std::vector<Output>& outputs,
               std::vector<at::Tensor>& to, double& seconds) {
  const double begin = now();
  std::vector<void*> made(plan.outputs());
  const int status = status_of(plan, inputs.data(), inputs.size(), made.data(), false);
  if (status != ok) return status;
  seconds = now() - begin;
  const std::vector<at::Tensor> owned = owned_by_caller(made);
  const PlainDispatch guards;
  for (const Output& output : outputs) to.push_back(output.of(owned));
  return ok;
}

// In the thread of the run that failed.
[[noreturn]] inline void raise_failure(_object* failed, int status) {
  const Interpreter lock;
  const Owned number(PyLong_FromLong(status));
  _object* arguments[] = {number.get()};
  const Owned nothing(number ? PyObject_Vectorcall(failed, arguments, 1, nullptr) : nullptr);
  throw python_error();
}

inline at::Tensor copy_of(const at::Tensor& tensor, const std::vector<int64_t>& strides) {
  const PlainDispatch guards;
  at::Tensor copy = at::empty_strided(tensor.sizes(), strides, tensor.options());
  copy.copy_(tensor);
  return copy;
}

// Hold the lock of the interpreter. False after an error of Python.
inline bool tell(_object* told, double seconds) {
  if (told == nullptr) return true;
  const Owned number(PyFloat_FromDouble(seconds));
  _object* arguments[] = {number.get()};
  const Owned result(number ? PyObject_Vectorcall(told, arguments, 1, nullptr) : nullptr);
  return static_cast<bool>(result);
}

inline at::Tensor tensor_at(void* impl) {
  using Pointer = c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  return at::Tensor(Pointer::reclaim_copy(static_cast<c10::TensorImpl*>(impl)));
}

// A call: who was called, and the arguments. In the place of a tensor without a gradient there is one of the same memory
// and version: what is written into the argument later may have a gradient by this call, and own the node, which would
// then own itself. It may be given up without the lock of the interpreter.
struct Given {
  struct Argument {
    _object* object = nullptr;  // null: `tensor`
    at::Tensor tensor;
  };
  explicit Given(_object* self) : owner(new_reference(self)) {}
  ~Given() {
    const Interpreter lock;
    if (!lock) return;
    for (const Argument& each : arguments) {
      if (each.object != nullptr) Py_DecRef(each.object);
    }
    Py_DecRef(owner);
  }
  Given(const Given&) = delete;
  Given& operator=(const Given&) = delete;

  void add(_object* argument, void* tensor) {
    if (tensor == nullptr || static_cast<c10::TensorImpl*>(tensor)->requires_grad()) {
      arguments.push_back({new_reference(argument), {}});
    } else {
      arguments.push_back({nullptr, tensor_at(tensor).tensor_data()});
    }
  }

  _object* tuple() const {
    const auto count = static_cast<std::ptrdiff_t>(arguments.size());
    _object* made = PyTuple_New(count);
    for (std::ptrdiff_t i = 0; made != nullptr && i < count; ++i) {
      const Argument& each = arguments[static_cast<size_t>(i)];
      PyTuple_SetItem(made, i, each.object != nullptr ? new_reference(each.object) : THPVariable_Wrap(each.tensor));
    }
    return made;
  }

  _object* const owner;
  std::vector<Argument> arguments;
};

}  // namespace daceml
