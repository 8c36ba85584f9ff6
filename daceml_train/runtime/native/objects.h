// Python objects of classes with `__slots__`, which are created and read by the address of a slot.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "interpreter.h"

extern "C" {
void Py_IncRef(_object*);
void Py_DecRef(_object*);
_object* PyObject_Type(_object*);
_object* PyType_GenericAlloc(_object*, std::ptrdiff_t);
_object* PyObject_GetAttr(_object*, _object*);
_object* PyObject_GetAttrString(_object*, const char*);
int PyObject_SetAttrString(_object*, const char*, _object*);
int PyObject_RichCompareBool(_object*, _object*, int);
_object* PyObject_CallMethodObjArgs(_object*, _object*, ...);
_object* PyObject_Vectorcall(_object*, _object* const*, size_t, _object*);
_object* PyUnicode_InternFromString(const char*);
_object* PyTuple_New(std::ptrdiff_t);
std::ptrdiff_t PyTuple_Size(_object*);
_object* PyTuple_GetItem(_object*, std::ptrdiff_t);
int PyTuple_SetItem(_object*, std::ptrdiff_t, _object*);
int PyList_Append(_object*, _object*);
_object* PyDict_New();
_object* PyDict_GetItemWithError(_object*, _object*);
int PyDict_SetItem(_object*, _object*, _object*);
_object* PySet_New(_object*);
int PySet_Add(_object*, _object*);
int PySequence_Contains(_object*, _object*);
long PyLong_AsLong(_object*);
long long PyLong_AsLongLong(_object*);
unsigned long long PyLong_AsUnsignedLongLong(_object*);
double PyFloat_AsDouble(_object*);
_object* PyBool_FromLong(long);
_object* PyMethod_Function(_object*);
_object* PyMethod_Self(_object*);
_object* PyFunction_GetCode(_object*);
_object* PyFunction_GetDefaults(_object*);
_object* PyFunction_GetKwDefaults(_object*);
_object* PyErr_Occurred();
void PyErr_SetString(_object*, const char*);
void PyErr_Clear();
_object* PyCapsule_New(void*, const char*, void (*)(_object*));
void* PyCapsule_GetPointer(_object*, const char*);
_object* (*PyCFunction_GetFunction(_object*))(_object*, _object* const*, std::ptrdiff_t);
_object* PyCFunction_GetSelf(_object*);
_object* PyCMethod_New(void*, _object*, _object*, _object*);
int PyContextVar_Get(_object*, _object*, _object**);
extern _object* PyExc_RuntimeError;
extern _object* PyExc_TypeError;
extern _object _Py_NoneStruct;
}

namespace daceml {

inline _object* none() { return &_Py_NoneStruct; }

// A reference that this object owns.
class Owned {
 public:
  Owned() = default;
  explicit Owned(_object* object) : object_(object) {}
  Owned(Owned&& other) noexcept : object_(other.release()) {}
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() {
    if (object_ != nullptr) Py_DecRef(object_);
  }
  _object* get() const { return object_; }
  explicit operator bool() const { return object_ != nullptr; }
  _object* release() {
    _object* object = object_;
    object_ = nullptr;
    return object;
  }

 private:
  _object* object_ = nullptr;
};

inline _object* new_reference(_object* object) {
  Py_IncRef(object);
  return object;
}

// An object begins with its count of references, and its type.
inline _object* type_of(_object* object) { return reinterpret_cast<_object**>(object)[1]; }

// A slot of a class, by its distance from the beginning of an instance; 0 if the class has no such slot.
inline size_t slot_of(_object* type, const char* name) {
  const Owned size(PyObject_GetAttrString(type, "__basicsize__"));
  const Owned object(PyType_GenericAlloc(type, 0));
  const Owned marker(PyList_New(0));
  if (!size || !object || !marker || PyObject_SetAttrString(object.get(), name, marker.get()) < 0) return 0;
  const auto* words = reinterpret_cast<_object* const*>(object.get());
  const auto count = static_cast<size_t>(PyLong_AsLong(size.get())) / sizeof(_object*);
  for (size_t i = 2; i < count; ++i) {
    if (words[i] == marker.get()) return i * sizeof(_object*);
  }
  return 0;
}

// A slot of an object; what it refers to is borrowed. `none` stands for one that was never set.
inline _object* field(_object* object, size_t slot) {
  _object* found = *reinterpret_cast<_object**>(reinterpret_cast<char*>(object) + slot);
  return found == nullptr ? none() : found;
}

// Takes over a reference.
inline void put(_object* object, size_t slot, _object* value) {
  _object*& place = *reinterpret_cast<_object**>(reinterpret_cast<char*>(object) + slot);
  _object* before = place;
  place = value;
  if (before != nullptr) Py_DecRef(before);
}

}  // namespace daceml
