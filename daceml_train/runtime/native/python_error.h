// Exceptions of operators written in Python. Their kernels leave Python's error indicator set on the thread.
//
// Declared by hand from the stable ABI: the library then needs no Python headers and serves every Python version.
#pragma once

#include <string>

struct _object;
extern "C" {
int PyGILState_Ensure();
void PyGILState_Release(int state);
int Py_IsInitialized();
_object* PyErr_Occurred();
void PyErr_Fetch(_object** type, _object** value, _object** traceback);
void PyErr_NormalizeException(_object** type, _object** value, _object** traceback);
void PyErr_Clear();
int PyException_SetTraceback(_object* exception, _object* traceback);
_object* PyObject_Repr(_object* object);
_object* PyUnicode_AsUTF8String(_object* text);
char* PyBytes_AsString(_object* bytes);
void Py_DecRef(_object* object);
}

namespace daceml {

// Takes the pending Python exception, if any: returns a new reference and its `repr`, or null.
inline _object* take_python_error(std::string& text) {
  if (!Py_IsInitialized()) return nullptr;
  const int state = PyGILState_Ensure();
  _object *type = nullptr, *value = nullptr, *traceback = nullptr;
  if (PyErr_Occurred() != nullptr) {
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (value != nullptr && traceback != nullptr) PyException_SetTraceback(value, traceback);
    _object* shown = PyObject_Repr(value);
    _object* bytes = shown == nullptr ? nullptr : PyUnicode_AsUTF8String(shown);
    text = bytes == nullptr ? "an exception that cannot be printed" : PyBytes_AsString(bytes);
    PyErr_Clear();
    for (_object* object : {type, traceback, shown, bytes}) Py_DecRef(object);  // null is allowed
  }
  PyGILState_Release(state);
  return value;
}

}  // namespace daceml
