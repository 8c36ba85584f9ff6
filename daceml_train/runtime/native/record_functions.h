// The functions of `records.h` and `record_columns.h`, as functions of Python. Arguments are not checked again.
#pragma once

#include "record_columns.h"

namespace daceml {

using Arguments = _object* const*;

inline std::vector<_object*> items(_object* tuple) {
  std::vector<_object*> found;
  for (std::ptrdiff_t i = 0; i < PyTuple_Size(tuple); ++i) found.push_back(item(tuple, i));
  return found;
}

inline OperandPlace place_of(_object* pair) { return {number(pair, 0), number(pair, 1)}; }

// A function that repeats a record. Arguments: whether gradients are on, the number of operands, the end of the path, the
// values that are used; guards (kind, operand, element, count, object); inputs (operand, element, whether it is lazy); the
// type of each value, or None; the result in prefix notation.
inline _object* new_record(_object* self, Arguments args, std::ptrdiff_t) {
  static Method method{"repeated", Record::call, FAST, "Records once more what a block has recorded."};
  auto record = std::make_unique<Record>();
  record->classes = *own<const Classes*>(self);
  record->grad = PyLong_AsLong(args[0]) != 0;
  record->operands = static_cast<std::ptrdiff_t>(PyLong_AsLong(args[1]));
  record->at = args[2], record->used = args[3];
  for (_object* guard : items(args[4])) {
    const auto kind = static_cast<Record::Kind>(number(guard, 0));
    record->guards.push_back({kind, {number(guard, 1), number(guard, 2)}, number(guard, 3), item(guard, 4)});
  }
  for (_object* input : items(args[5])) {
    if (number(input, 2) != 0) record->lazy_inputs.push_back(static_cast<int64_t>(record->inputs.size()));
    record->inputs.push_back(place_of(input));
  }
  for (_object* meta : items(args[6])) record->metas.push_back(meta == none() ? nullptr : meta);
  for (_object* each : items(args[7])) record->result.push_back(PyLong_AsLongLong(each));
  if (PyErr_Occurred() != nullptr) return nullptr;
  return function_of(&method, std::move(record), {args[2], args[3], args[4], args[6]});
}

// What a function calls in place of a block, and what that calls where no record is repeated.
inline _object* new_entry(_object* self, Arguments args, std::ptrdiff_t) {
  static Method method{"called", Entry::call, FAST, "Statements of a recursive function that only compute."};
  auto entry = std::make_unique<Entry>(Entry{*own<const Classes*>(self), args[0], args[1]});
  return function_of(&method, std::move(entry), {args[0], args[1]});
}

inline _object* truth(bool value) { return PyBool_FromLong(value); }
inline _object* none_if(bool well) { return well ? new_reference(none()) : nullptr; }
inline int64_t* address(_object* integer) { return reinterpret_cast<int64_t*>(PyLong_AsLongLong(integer)); }

// A function of columns: `body` takes what has them, and Python's arguments.
template <auto body>
_object* of_columns(_object* self, Arguments args, std::ptrdiff_t) {
  return body(Columns{**own<const Classes*>(self)}, args);
}

template <auto body>
Method column(const char* name) {
  return {name, of_columns<body>, FAST, "See frontends.torch.recursion.columns."};
}

inline std::vector<Method>& record_methods() {
  static std::vector<Method> all{
      {"record", new_record, FAST, "A function that repeats a record."},
      {"entry", new_entry, FAST, "A function that repeats a block's last record."},
      column<[](const Columns&, Arguments a) { return truth(unchanged(address(a[0]), PyLong_AsLongLong(a[1]))); }>("unchanged"),
      column<[](const Columns&, Arguments a) {
        arm(address(a[0]), PyLong_AsLongLong(a[1]));
        return new_reference(none());
      }>("arm"),
      column<[](const Columns& c, Arguments a) { return c.seal(a[0]); }>("seal"),
      column<[](const Columns& c, Arguments a) { return c.by_structure(a[0]); }>("by_structure"),
      column<[](const Columns& c, Arguments a) { return c.inputs(a[0]); }>("inputs"),
      column<[](const Columns& c, Arguments a) { return none_if(c.heights(a[0], address(a[1]))); }>("heights"),
      column<[](const Columns& c, Arguments a) { 
        return none_if(c.place(a[0], a[1], PyLong_AsLong(a[2]), a[3], address(a[4])));
      }>("place"),
      column<[](const Columns& c, Arguments a) { return c.sources(a[0], PyLong_AsLong(a[1]) != 0); }>("sources"),
      column<[](const Columns& c, Arguments a) { return none_if(c.positions(a[0], address(a[1]))); }>("positions"),
      column<[](const Columns& c, Arguments a) { return none_if(c.release(a[0], a[1])); }>("release"),
      column<[](const Columns& c, Arguments a) { return truth(c.unknown(a[0])); }>("unknown"),
      column<[](const Columns& c, Arguments a) { return c.metas(a[0]); }>("metas"),
      column<[](const Columns& c, Arguments a) { return truth(c.all_of(a[0], a[1])); }>("all_of"),
      column<[](const Columns& c, Arguments a) -> _object* {
        const long stage = c.use(a[0]);
        return stage < 0 ? nullptr : PyLong_FromLong(stage);
      }>("use"),
  };
  return all;
}

// The functions by name, from the classes of lazy values and of runs, the variable of the recorder, what stands for a miss,
// and the types of lists, tuples, methods, integers, and floats. Null and no error of Python: a class has other slots.
inline _object* record_functions(_object* given) {
  auto classes = std::make_unique<Classes>(Classes{item(given, 0), item(given, 1), item(given, 2), item(given, 3)});
  Classes& c = *classes;
  for (int i = 0; i < 5; ++i) c.types[i] = item(given, 4 + i);
  const Owned type(PyObject_Type(given));
  if (type.get() != type_of(given)) return new_reference(none());
  for (const auto& [slot, name] : std::initializer_list<std::pair<size_t*, const char*>>{
           {&c.of_lazy.source, "source"}, {&c.of_lazy.index, "index"},     {&c.of_lazy.meta, "meta"},
           {&c.of_lazy.value, "value"}}) {
    if ((*slot = slot_of(c.lazy, name)) == 0) return new_reference(none());
  }
  auto& run = c.of_run;
  for (const auto& [slot, name] : std::initializer_list<std::pair<size_t*, const char*>>{
           {&run.recorder, "recorder"}, {&run.at, "at"},         {&run.outer, "outer"},   {&run.inputs, "inputs"},
           {&run.slots, "slots"},       {&run.values, "values"}, {&run.used, "used"},     {&run.height, "height"},
           {&run.stage, "stage"},       {&run.sealed, "sealed"}, {&run.group, "group"},   {&run.position, "position"},
           {&run.forest, "forest"}}) {
    if ((*slot = slot_of(c.run, name)) == 0) return new_reference(none());
  }
  for (const auto& [name, text] : std::initializer_list<std::pair<_object**, const char*>>{
           {&c.last, "last"}, {&c.pending, "pending"}, {&c.use, "use"}, {&c.used, "used"}, {&c.height, "height"}, {&c.stage, "stage"}, {&c.operation, "operator"}}) {
    *name = PyUnicode_InternFromString(text);
  }
  c.yes = PyBool_FromLong(1), c.no = PyBool_FromLong(0), c.zero = PyLong_FromLong(0);
  const Owned found(PyDict_New());
  const Classes* kept = classes.release();  // they exist as long as the process
  Py_IncRef(given);
  for (Method& method : record_methods()) {
    const Owned name(PyUnicode_InternFromString(method.name));
    const Owned function(function_of(&method, std::make_unique<const Classes*>(kept), {}));
    if (function) c.function = type_of(function.get());
    if (!found || !function || PyDict_SetItem(found.get(), name.get(), function.get()) < 0) return nullptr;
  }
  return new_reference(found.get());
}

}  // namespace daceml
