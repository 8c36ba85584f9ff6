// The part of Python's stable interface that the executor uses, declared here: Python's headers are not installed everywhere.
#pragma once

#include <cstddef>

#include <ATen/core/TensorBase.h>

struct _object;
extern "C" {
int PyDict_Next(_object*, std::ptrdiff_t*, _object**, _object**);
std::ptrdiff_t PyList_Size(_object*);
_object* PyList_GetItem(_object*, std::ptrdiff_t);
_object* PyList_New(std::ptrdiff_t);
int PyList_SetItem(_object*, std::ptrdiff_t, _object*);
_object* PyLong_FromLong(long);
void* PyEval_SaveThread();
void PyEval_RestoreThread(void*);
}

// The Python object of a tensor, from libtorch_python.
_object* THPVariable_Wrap(const at::TensorBase& tensor);

// Where an object of this type has the address of its tensor, which is known for `probe`; 0 if it is not found.
inline size_t tensor_slot_of(_object* probe, const void* tensor) {
  auto* const* words = reinterpret_cast<void* const*>(probe);
  for (size_t i = 2; i < 5; ++i) {
    if (words[i] == tensor) return i * sizeof(void*);
  }
  return 0;
}
