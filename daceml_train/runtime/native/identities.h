// Identity guards: whether dictionaries and lists of Python still contain the same objects, compared before every step.
#pragma once

#include <cstdint>
#include <vector>

#include "interpreter.h"

namespace daceml {

// Containers and what they contained. The creator owns both, so that no address is used for another object.
struct Identities {
  struct Container {
    _object* object;
    bool is_list;
    int64_t count;
  };
  std::vector<Container> containers;
  std::vector<_object*> values;  // of all containers, one after the other; null: any object

  // Hold the lock of the interpreter.
  bool hold() const {
    const auto* expected = values.data();
    for (const Container& container : containers) {
      if (!(container.is_list ? list(container, expected) : dictionary(container, expected))) return false;
      expected += container.count;
    }
    return true;
  }

 private:
  static bool same(const _object* found, const _object* expected) { return expected == nullptr || found == expected; }

  static bool list(const Container& container, _object* const* expected) {
    if (PyList_Size(container.object) != container.count) return false;
    for (std::ptrdiff_t i = 0; i < container.count; ++i) {
      if (!same(PyList_GetItem(container.object, i), expected[i])) return false;
    }
    return true;
  }

  static bool dictionary(const Container& container, _object* const* expected) {
    std::ptrdiff_t position = 0;
    _object *key, *value;
    int64_t count = 0;
    while (PyDict_Next(container.object, &position, &key, &value)) {
      if (count == container.count || !same(value, expected[count])) return false;
      ++count;
    }
    return count == container.count;
  }
};

}  // namespace daceml
