// What blocks of a recursion record, natively: functions of Python that are called at each node of each tree.
#pragma once

#include <cstring>
#include <memory>
#include <string>

#include <c10/core/GradMode.h>

#include "objects.h"

namespace daceml {

// The classes of `frontends.torch.recursion`, and where their slots are.
struct Classes {
  _object *lazy, *run, *variable, *miss;  // `variable` has the recorder of a thread
  _object* types[5];                      // of lists, tuples, methods, integers, floats
  _object* function = nullptr;            // the type of functions in C
  struct {
    size_t source, index, meta, value;
  } of_lazy;
  struct {
    size_t recorder, at, outer, inputs, slots, values, used, height, stage, sealed, group, position, forest;
  } of_run;
  _object *last, *pending, *use, *used, *height, *stage, *operation;  // names
  _object *yes, *no, *zero;

  bool is_lazy(_object* a) const { return type_of(a) == lazy; }
  bool is_run(_object* a) const { return type_of(a) == run; }
  _object* list() const { return types[0]; }
};

// What a function of ours owns is in the tuple that Python passes to it, which the collector of garbage sees: first a
// capsule with the C++ object, which refers to the rest.
template <class T>
T* own(_object* self) {
  return static_cast<T*>(PyCapsule_GetPointer(PyTuple_GetItem(self, 0), nullptr));
}

struct Method {
  const char* name;
  _object* (*function)(_object*, _object* const*, std::ptrdiff_t);
  int flags;
  const char* doc;
};
constexpr int FAST = 0x0080;  // METH_FASTCALL

template <class T>
_object* function_of(Method* method, std::unique_ptr<T> data, const std::vector<_object*>& kept) {
  const Owned self(PyTuple_New(static_cast<std::ptrdiff_t>(kept.size()) + 1));
  if (!self) return nullptr;
  _object* capsule = PyCapsule_New(data.get(), nullptr, [](_object* capsule_) {
    delete static_cast<T*>(PyCapsule_GetPointer(capsule_, nullptr));
  });
  if (capsule == nullptr) return nullptr;
  data.release();
  PyTuple_SetItem(self.get(), 0, capsule);
  for (size_t i = 0; i < kept.size(); ++i) {
    PyTuple_SetItem(self.get(), static_cast<std::ptrdiff_t>(i) + 1, new_reference(kept[i]));
  }
  return PyCMethod_New(method, self.get(), nullptr, nullptr);
}

inline _object* item(_object* tuple, std::ptrdiff_t i) { return PyTuple_GetItem(tuple, i); }
inline int64_t number(_object* tuple, std::ptrdiff_t i) { return PyLong_AsLongLong(item(tuple, i)); }

// Whether numbers are what they were: pairs of an address and a number.
inline bool unchanged(const int64_t* pairs, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if (*reinterpret_cast<const int64_t*>(pairs[2 * i]) != pairs[2 * i + 1]) return false;
  }
  return true;
}

// Notes what they are now.
inline void arm(int64_t* pairs, int64_t count) {
  for (int64_t i = 0; i < count; ++i) pairs[2 * i + 1] = *reinterpret_cast<const int64_t*>(pairs[2 * i]);
}

// Where an operand is; `element` is its position in a list, or -1.
struct OperandPlace {
  int64_t operand, element;

  _object* in(_object* const* operands) const {
    _object* found = operands[operand];
    return element < 0 ? found : PyList_GetItem(found, element);
  }
};

// A record that is repeated: see `frontends.torch.recursion.repeats`, which describes it.
struct Record {
  enum Kind : int64_t { lazy, list, numbers, same, method, scalar, again, unchanged, entry, code };
  struct Guard {
    Kind kind;
    OperandPlace place;
    int64_t count;
    _object* object;
  };
  const Classes* classes;
  bool grad = false;
  std::ptrdiff_t operands = 0;
  _object *at = nullptr, *used = nullptr;
  std::vector<Guard> guards;
  std::vector<OperandPlace> inputs;
  std::vector<int64_t> lazy_inputs;
  std::vector<_object*> metas;  // null: a value that is not returned
  std::vector<int64_t> result;

  // Whether what is no operand is as it was; -1 after an error of Python. See `frontends.torch.recursion.watches`.
  int watched(const Guard& guard) const {
    switch (guard.kind) {
      case unchanged: return daceml::unchanged(reinterpret_cast<const int64_t*>(guard.place.element), guard.count);
      case entry: {
        _object* found = PyDict_GetItemWithError(item(guard.object, 0), item(guard.object, 1));
        if (found == nullptr && PyErr_Occurred() != nullptr) return -1;
        return (found == nullptr ? classes->miss : found) == item(guard.object, 2);
      }
      default: {
        _object* function = item(guard.object, 0);
        const auto is = [&guard](_object* found, std::ptrdiff_t i) {
          return (found == nullptr ? none() : found) == item(guard.object, i);
        };
        return is(PyFunction_GetCode(function), 1) && is(PyFunction_GetDefaults(function), 2) &&
               is(PyFunction_GetKwDefaults(function), 3);
      }
    }
  }

  // Whether an operand, or what is none, is as it was; -1 after an error of Python.
  int holds(const Guard& guard, _object* const* given) const {
    if (guard.kind >= unchanged) return watched(guard);
    _object* a = guard.place.in(given);
    switch (guard.kind) {
      case lazy:
        return classes->is_lazy(a) && field(a, classes->of_lazy.meta) == guard.object &&
               field(a, classes->of_lazy.value) == none();
      case list: return type_of(a) == classes->list() && PyList_Size(a) == guard.count;
      case numbers: {
        if (type_of(a) != classes->list() || PyList_Size(a) != guard.count) return 0;
        for (int64_t i = 0; i < guard.count; ++i) {
          if (type_of(PyList_GetItem(a, i)) != guard.object) return 0;
        }
        return 1;
      }
      case same: return a == guard.object;
      case again: return a == given[guard.count];
      case method:
        return type_of(a) == classes->types[2] && PyMethod_Self(a) == PyMethod_Self(guard.object) &&
               PyMethod_Function(a) == PyMethod_Function(guard.object);
      case scalar: {
        if (type_of(a) != type_of(guard.object)) return 0;
        if (type_of(a) != classes->types[4]) return PyObject_RichCompareBool(a, guard.object, 2);
        const double x = PyFloat_AsDouble(a), y = PyFloat_AsDouble(guard.object);  // 0.0 and -0.0 differ
        return std::memcmp(&x, &y, sizeof x) == 0;
      }
      default: return 0;
    }
  }

  // Notes that a value is read; raises the height and the stage of its reader. False after an error of Python.
  bool read(_object* value, long& height, long& stage) const {
    _object* source = field(value, classes->of_lazy.source);
    _object* index = field(value, classes->of_lazy.index);
    long own_height, own_stage;
    int known;
    if (classes->is_run(source)) {
      const auto& slots = classes->of_run;
      known = PySequence_Contains(field(source, slots.used), index);
      own_height = PyLong_AsLong(field(source, slots.height));
      own_stage = PyLong_AsLong(field(source, slots.stage));
    } else {
      const Owned used_(PyObject_GetAttr(source, classes->used)), height_(PyObject_GetAttr(source, classes->height)),
          stage_(PyObject_GetAttr(source, classes->stage));
      if (!used_ || !height_ || !stage_) return false;
      known = PySequence_Contains(used_.get(), index);
      own_height = PyLong_AsLong(height_.get());
      own_stage = PyLong_AsLong(stage_.get());
    }
    if (known < 0 || ((own_height == -1 || own_stage == -1) && PyErr_Occurred() != nullptr)) return false;
    if (known == 0 && !Owned(PyObject_CallMethodObjArgs(source, classes->use, index, nullptr))) return false;
    if (own_height >= height) height = own_height + 1;
    if (own_stage > stage) stage = own_stage;
    return true;
  }

  _object* value(_object* run, int64_t index) const {
    _object* found = PyType_GenericAlloc(classes->lazy, 0);
    if (found == nullptr) return nullptr;
    const auto& slots = classes->of_lazy;
    put(found, slots.source, new_reference(run));
    put(found, slots.index, PyLong_FromLong(index));
    put(found, slots.meta, new_reference(metas[static_cast<size_t>(index)]));
    put(found, slots.value, new_reference(none()));
    return found;
  }

  // What the block returns, from a list of numbers in prefix notation.
  _object* returned(size_t& next, _object* values, _object* const* given) const {
    switch (result[next++]) {
      case 0: return new_reference(PyTuple_GetItem(values, result[next++]));
      case 1: {
        const OperandPlace place{result[next], result[next + 1]};
        next += 2;
        return new_reference(place.in(given));
      }
      default: {
        const bool is_list = result[next - 1] == 3;
        const int64_t count = result[next++];
        Owned found(is_list ? PyList_New(count) : PyTuple_New(count));
        for (int64_t i = 0; found && i < count; ++i) {
          _object* part = returned(next, values, given);
          if (part == nullptr) return nullptr;
          is_list ? PyList_SetItem(found.get(), i, part) : PyTuple_SetItem(found.get(), i, part);
        }
        return found.release();
      }
    }
  }

  _object* run_of(_object* recorder, long height, long stage, _object* const* given) const {
    Owned run(PyType_GenericAlloc(classes->run, 0));
    Owned own_inputs(PyTuple_New(static_cast<std::ptrdiff_t>(inputs.size())));
    if (!run || !own_inputs) return nullptr;
    for (size_t i = 0; i < inputs.size(); ++i) {
      PyTuple_SetItem(own_inputs.get(), static_cast<std::ptrdiff_t>(i), new_reference(inputs[i].in(given)));
    }
    const auto& slots = classes->of_run;
    const auto set = [&run](size_t slot, _object* object) { put(run.get(), slot, object); };
    set(slots.recorder, new_reference(recorder)), set(slots.at, new_reference(at)), set(slots.outer, new_reference(classes->no));
    set(slots.slots, new_reference(none())), set(slots.group, new_reference(none())), set(slots.forest, new_reference(none()));
    set(slots.position, new_reference(classes->zero)), set(slots.sealed, new_reference(classes->yes)), set(slots.used, new_reference(used));
    set(slots.height, PyLong_FromLong(height)), set(slots.stage, PyLong_FromLong(stage));
    set(slots.inputs, own_inputs.release());
    return run.release();
  }

  // The result of the block for a recorder and operands; `miss` if the record was not made for them.
  _object* repeat(_object* recorder, _object* const* given, std::ptrdiff_t count) const {
    if (count != operands) return PyErr_SetString(PyExc_TypeError, "a block of another number of operands"), nullptr;
    if (c10::GradMode::is_enabled() != grad) return new_reference(classes->miss);
    for (const Guard& guard : guards) {
      const int held = holds(guard, given);
      if (held <= 0) return held < 0 ? nullptr : new_reference(classes->miss);
    }
    long height = 0, stage = 0;
    for (const int64_t i : lazy_inputs) {
      if (!read(inputs[static_cast<size_t>(i)].in(given), height, stage)) return nullptr;
    }
    const Owned run(run_of(recorder, height, stage, given));
    Owned values(PyTuple_New(static_cast<std::ptrdiff_t>(metas.size())));
    const Owned pending(PyObject_GetAttr(recorder, classes->pending));
    if (!run || !values || !pending || PyList_Append(pending.get(), run.get()) < 0) return nullptr;
    for (size_t i = 0; i < metas.size(); ++i) {
      _object* own_value = metas[i] == nullptr ? new_reference(none()) : value(run.get(), static_cast<int64_t>(i));
      if (own_value == nullptr) return nullptr;
      PyTuple_SetItem(values.get(), static_cast<std::ptrdiff_t>(i), own_value);
    }
    put(run.get(), classes->of_run.values, new_reference(values.get()));
    size_t next = 0;
    return returned(next, values.get(), given);
  }

  static _object* call(_object* self, _object* const* args, std::ptrdiff_t count) {
    if (count < 1) return PyErr_SetString(PyExc_TypeError, "a record without a recorder"), nullptr;
    return own<Record>(self)->repeat(args[0], args + 1, count - 1);
  }
};

// What a recursive function calls in place of a block's statements: repeats the record that was repeated last.
struct Entry {
  const Classes* classes;
  _object *block, *rest;

  static _object* call(_object* self, _object* const* args, std::ptrdiff_t count) {
    const Entry& entry = *own<Entry>(self);
    const Classes& classes = *entry.classes;
    _object* found = nullptr;
    if (PyContextVar_Get(classes.variable, nullptr, &found) < 0) return nullptr;
    const Owned recorder(found);
    if (recorder && recorder.get() != none()) {
      const Owned last(PyObject_GetAttr(recorder.get(), classes.last));
      if (!last) return nullptr;
      _object* known = PyDict_GetItemWithError(last.get(), entry.block);
      if (known == nullptr && PyErr_Occurred() != nullptr) return nullptr;
      if (known != nullptr) {
        const Owned repeated(new_reference(known));
        if (type_of(known) == classes.function && PyCFunction_GetFunction(known) == Record::call) {  // without a copy
          Owned result(own<Record>(PyCFunction_GetSelf(known))->repeat(recorder.get(), args, count));
          if (!result || result.get() != classes.miss) return result.release();
          return PyObject_Vectorcall(entry.rest, args, static_cast<size_t>(count), nullptr);
        }
        std::vector<_object*> given{recorder.get()};
        given.insert(given.end(), args, args + count);
        Owned result(PyObject_Vectorcall(repeated.get(), given.data(), given.size(), nullptr));
        if (!result || result.get() != classes.miss) return result.release();
      }
    }
    return PyObject_Vectorcall(entry.rest, args, static_cast<size_t>(count), nullptr);
  }
};

}  // namespace daceml
