// The check of the tensors handed to a run: everything is compared before anything runs.
#pragma once

#include <stdexcept>
#include <string>

#include <c10/core/TensorImpl.h>

#include "layout.h"

namespace daceml {

// An input does not have the layout the plan was specialized for; nothing has run.
struct InputMismatch : std::runtime_error {
  InputMismatch(int index, const std::string& text) : std::runtime_error(text), index(index) {}
  int index;
};

inline const c10::DispatchKeySet& unreadable_keys() {
  static const c10::DispatchKeySet keys({c10::DispatchKey::Python, c10::DispatchKey::Conjugate, c10::DispatchKey::Negative,
                                         c10::DispatchKey::ZeroTensor});
  return keys;
}

inline bool is_plain(const c10::TensorImpl& tensor) {
  return tensor.has_storage() && tensor.is_cpu() && tensor.layout() == c10::kStrided &&
         !tensor.has_symbolic_sizes_strides() && !tensor.key_set().has_any(unreadable_keys());
}

// True if the storage holds every element (`untyped_storage().resize_(0)` leaves a tensor without memory).
inline bool is_backed(const c10::TensorImpl& tensor, const Layout& layout) {
  const int64_t offset = tensor.storage_offset() * static_cast<int64_t>(tensor.itemsize());
  return layout.elements == 0 || offset + layout.bytes <= static_cast<int64_t>(tensor.unsafe_storage().nbytes());
}

inline bool fits(const c10::TensorImpl& tensor, const Layout& layout) {
  return is_plain(tensor) && c10::typeMetaToScalarType(tensor.dtype()) == layout.dtype &&
         tensor.sizes() == c10::IntArrayRef(layout.sizes) && layout.same_strides(tensor.strides()) &&
         is_backed(tensor, layout);
}

// Says what differs; called only when `fits` is false.
[[noreturn]] inline void refuse(int index, const c10::TensorImpl* tensor, const Layout& layout) {
  std::string given;
  if (tensor == nullptr) {
    given = "no tensor";
  } else if (!tensor->is_cpu()) {
    given = "a tensor on " + tensor->device().str();
  } else if (!is_plain(*tensor)) {
    given = "a tensor that is not plain strided memory (a subclass, sparse, symbolic, or lazily conjugated)";
  } else {
    given = describe(c10::typeMetaToScalarType(tensor->dtype()), tensor->sizes(), tensor->strides());
    if (tensor->sizes() == c10::IntArrayRef(layout.sizes) && !is_backed(*tensor, layout)) given += " without storage of its own";
  }
  throw InputMismatch(index, "input " + std::to_string(index) + ": expected " + describe(layout) + " on cpu, given " + given);
}

}  // namespace daceml
