// The lock of the interpreter, and an error of Python that passes through code of PyTorch.
#pragma once

#include <exception>
#include <string>
#include <utility>

#include "objects.h"

extern "C" {
int Py_IsInitialized();
int PyGILState_Ensure();
void PyGILState_Release(int);
void PyErr_Fetch(_object**, _object**, _object**);
void PyErr_Restore(_object*, _object*, _object*);
_object* PyFloat_FromDouble(double);
}

namespace daceml {

// The calling thread holds the lock as long as this lives; false when the interpreter has ended.
class Interpreter {
 public:
  Interpreter() : there_(Py_IsInitialized() != 0), state_(there_ ? PyGILState_Ensure() : 0) {}
  ~Interpreter() {
    if (there_) PyGILState_Release(state_);
  }
  Interpreter(const Interpreter&) = delete;
  Interpreter& operator=(const Interpreter&) = delete;
  explicit operator bool() const { return there_; }

 private:
  bool there_;
  int state_;
};

}  // namespace daceml

// As torch/csrc/Exceptions.h has it, which needs Python's headers. The engine of autograd knows it by this name, and raises
// what it holds: here the error that Python has just set. PyTorch's own are caught under it.
struct __attribute__((visibility("default"))) python_error : std::exception {
  python_error() { PyErr_Fetch(&type, &value, &traceback); }
  python_error(const python_error&) = delete;
  python_error& operator=(const python_error&) = delete;
  ~python_error() override {
    const daceml::Interpreter lock;
    if (!lock) return;
    for (_object* each : {type, value, traceback}) {
      if (each != nullptr) Py_DecRef(each);
    }
  }
  // Sets the error once more, for the interpreter. Hold its lock.
  void raise() const {
    for (_object* each : {type, value, traceback}) {
      if (each != nullptr) Py_IncRef(each);
    }
    if (type != nullptr) PyErr_Restore(type, value, traceback);
  }
  const char* what() const noexcept override { return message.c_str(); }

  _object *type = nullptr, *value = nullptr, *traceback = nullptr;
  std::string message = "an error of Python";
};
