// Many recorded runs, or many lazy values, at once: what Python would do in a loop over them.
#pragma once

#include <algorithm>

#include "records.h"

namespace daceml {

// Functions of lists, which the callers have checked to be lists of runs or of lazy values unless they say otherwise.
struct Columns {
  const Classes& classes;

  _object* source(_object* value) const { return field(value, classes.of_lazy.source); }
  _object* index(_object* value) const { return field(value, classes.of_lazy.index); }
  _object* group(_object* run) const { return field(run, classes.of_run.group); }
  bool waits(_object* source_) const { return classes.is_run(source_) && field(source_, classes.of_run.forest) == none(); }

  template <class Body>
  static bool each(_object* list, Body body) {
    for (std::ptrdiff_t i = 0, count = PyList_Size(list); i < count; ++i) {
      if (!body(PyList_GetItem(list, i))) return false;
    }
    return true;
  }

  // Seals runs; those that compute anything by their stages: a dictionary of lists.
  _object* seal(_object* runs) const {
    Owned found(PyDict_New());
    _object *end = nullptr, *stage = nullptr, *list = nullptr;  // of the run before
    bool computes = false;
    const bool well = found && each(runs, [&](_object* run) {
      put(run, classes.of_run.sealed, new_reference(classes.yes));
      if (_object* own_end = field(run, classes.of_run.at); own_end != end) {
        const Owned operation(PyObject_GetAttr(end = own_end, classes.operation));
        if (!operation) return false;
        computes = operation.get() != none();
      }
      if (!computes) return true;
      if (_object* own_stage = field(run, classes.of_run.stage); own_stage != stage) {
        list = PyDict_GetItemWithError(found.get(), stage = own_stage);
        if (list == nullptr) {
          const Owned empty(PyList_New(0));
          if (PyErr_Occurred() != nullptr || !empty || PyDict_SetItem(found.get(), stage, empty.get()) < 0) return false;
          list = empty.get();  // which the dictionary keeps
        }
      }
      return PyList_Append(list, run) == 0;
    });
    return well ? found.release() : nullptr;
  }

  // Runs by the ends of their paths, in the order of their heights: a dictionary of lists.
  _object* by_structure(_object* runs) const {
    Owned found(PyDict_New());
    std::vector<std::pair<_object*, std::vector<std::pair<long, _object*>>>> groups;
    each(runs, [&](_object* run) {
      _object* end = field(run, classes.of_run.at);
      size_t g = 0;
      while (g < groups.size() && groups[g].first != end) ++g;
      if (g == groups.size()) groups.push_back({end, {}});
      groups[g].second.push_back({PyLong_AsLong(field(run, classes.of_run.height)), run});
      return true;
    });
    for (auto& [end, members] : groups) {
      std::stable_sort(members.begin(), members.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
      const Owned list(PyList_New(static_cast<std::ptrdiff_t>(members.size())));
      if (!list || !found) return nullptr;
      for (size_t i = 0; i < members.size(); ++i) {
        PyList_SetItem(list.get(), static_cast<std::ptrdiff_t>(i), new_reference(members[i].second));
      }
      if (PyDict_SetItem(found.get(), end, list.get()) < 0) return nullptr;
    }
    return found.release();
  }

  // Per input, the list of what runs of one structure take.
  _object* inputs(_object* runs) const {
    const std::ptrdiff_t count = PyList_Size(runs);
    const auto width = [&](_object* own_inputs) {
      return type_of(own_inputs) == classes.list() ? PyList_Size(own_inputs) : PyTuple_Size(own_inputs);
    };
    const std::ptrdiff_t columns = width(field(PyList_GetItem(runs, 0), classes.of_run.inputs));
    Owned found(PyList_New(columns));
    for (std::ptrdiff_t k = 0; found && k < columns; ++k) {
      _object* column = PyList_New(count);
      if (column == nullptr) return nullptr;
      PyList_SetItem(found.get(), k, column);
      for (std::ptrdiff_t i = 0; i < count; ++i) {
        _object* own_inputs = field(PyList_GetItem(runs, i), classes.of_run.inputs);
        if (width(own_inputs) != columns) {
          return PyErr_SetString(PyExc_RuntimeError, "runs of one structure have different numbers of inputs"), nullptr;
        }
        const bool is_list = type_of(own_inputs) == classes.list();
        PyList_SetItem(column, i, new_reference(is_list ? PyList_GetItem(own_inputs, k) : PyTuple_GetItem(own_inputs, k)));
      }
    }
    return found.release();
  }

  bool heights(_object* runs, int64_t* to) const {
    return each(runs, [&](_object* run) { return *to++ = PyLong_AsLong(field(run, classes.of_run.height)), true; });
  }

  // Members of a group, in positions from `first` on, or after `first` in those of `numbers`; of a forest, unless it is None.
  bool place(_object* runs, _object* group_, long first, _object* forest, const int64_t* numbers) const {
    long next = 0;
    return each(runs, [&](_object* run) {
      const long position = numbers == nullptr ? next++ : static_cast<long>(*numbers++);
      put(run, classes.of_run.group, new_reference(group_));
      put(run, classes.of_run.position, PyLong_FromLong(first + position));
      if (forest != none()) put(run, classes.of_run.forest, new_reference(forest));
      return true;
    });
  }

  // The distinct (group, number) of values of runs, in a list after whether there is anything else. With `waiting`, only
  // those of runs that are not computed.
  _object* sources(_object* values, bool waiting) const {
    bool data = false;
    std::vector<std::pair<_object*, _object*>> distinct;
    each(values, [&](_object* a) {
      if (!classes.is_lazy(a) || !(waiting ? waits(source(a)) : classes.is_run(source(a)))) return data = true;
      const std::pair<_object*, _object*> pair{group(source(a)), index(a)};
      if (std::find(distinct.begin(), distinct.end(), pair) == distinct.end()) distinct.push_back(pair);
      return true;
    });
    Owned found(PyList_New(0));
    if (!found || PyList_Append(found.get(), data ? classes.yes : classes.no) < 0) return nullptr;
    for (const auto& [group_, index_] : distinct) {
      const Owned pair(PyTuple_New(2));
      if (!pair) return nullptr;
      PyTuple_SetItem(pair.get(), 0, new_reference(group_));
      PyTuple_SetItem(pair.get(), 1, new_reference(index_));
      if (PyList_Append(found.get(), pair.get()) < 0) return nullptr;
    }
    return found.release();
  }

  bool positions(_object* values, int64_t* to) const {
    return each(values, [&](_object* a) { return *to++ = PyLong_AsLong(field(source(a), classes.of_run.position)), true; });
  }

  // What runs refer to, and what refers to them, is released.
  bool release(_object* runs, _object* empty) const {
    const auto& slots = classes.of_run;
    return each(runs, [&](_object* run) {
      for (const size_t slot : {slots.height, slots.stage}) put(run, slot, new_reference(classes.zero));
      for (const size_t slot : {slots.inputs, slots.values}) put(run, slot, new_reference(empty));
      return true;
    });
  }

  // Whether all of any objects are lazy values that are not known.
  bool unknown(_object* values) const {
    return each(values, [&](_object* a) { return classes.is_lazy(a) && field(a, classes.of_lazy.value) == none(); });
  }

  // The distinct types of lazy values.
  _object* metas(_object* values) const {
    Owned found(PySet_New(nullptr));
    _object* before = nullptr;
    const bool well = found && each(values, [&](_object* a) {
      _object* meta = field(a, classes.of_lazy.meta);
      if (meta == before) return true;
      before = meta;
      return PySet_Add(found.get(), meta) == 0;
    });
    return well ? found.release() : nullptr;
  }

  // Whether all of any objects are lazy values of runs that belong to this forest.
  bool all_of(_object* values, _object* forest) const {
    return each(values, [&](_object* a) {
      return classes.is_lazy(a) && classes.is_run(source(a)) && field(source(a), classes.of_run.forest) == forest;
    });
  }

  // Notes that values are read; the first stage after their sources, or -1 after an error of Python.
  long use(_object* values) const {
    long stage = 0;
    const bool well = each(values, [&](_object* a) {
      if (field(a, classes.of_lazy.value) != none()) return true;
      _object* from = source(a);
      const bool waiting = waits(from);
      const Owned own_stage(PyObject_GetAttr(from, classes.stage));
      if (!own_stage) return false;
      stage = std::max(stage, PyLong_AsLong(own_stage.get()) + waiting);
      if (!waiting) return true;
      const int known = PySequence_Contains(field(from, classes.of_run.used), index(a));
      if (known != 0) return known > 0;
      return static_cast<bool>(Owned(PyObject_CallMethodObjArgs(from, classes.use, index(a), nullptr)));
    });
    return well ? stage : -1;
  }
};

}  // namespace daceml
