// Identity guards: whether dictionaries and lists of Python still contain the same objects, compared before every step,
// and whether those that are tensors still have the same memory, which `torch.utils.swap_tensors` exchanges.
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
  struct Value {
    _object* object;           // null: any object
    const void* const* place;  // where the object of a tensor has the tensor's address; null: not looked at
    const void* tensor;
  };
  std::vector<Container> containers;
  std::vector<Value> values;  // of all containers, one after the other

  void add(_object* object, const void* tensor) {
    const size_t slot = tensor == nullptr ? 0 : tensor_slot_of(object, tensor);
    const auto* place = slot == 0 ? nullptr : reinterpret_cast<const char*>(object) + slot;
    values.push_back({object, reinterpret_cast<const void* const*>(place), tensor});
  }

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
  static bool same(const _object* found, const Value& expected) {
    if (expected.object == nullptr) return true;
    return found == expected.object && (expected.place == nullptr || *expected.place == expected.tensor);
  }

  static bool list(const Container& container, const Value* expected) {
    if (PyList_Size(container.object) != container.count) return false;
    for (std::ptrdiff_t i = 0; i < container.count; ++i) {
      if (!same(PyList_GetItem(container.object, i), expected[i])) return false;
    }
    return true;
  }

  static bool dictionary(const Container& container, const Value* expected) {
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
