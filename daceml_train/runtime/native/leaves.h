// What others have attached to the leaves of autograd, and which arguments share memory with what a step updates: looked at
// before every training step, so without Python.
#pragma once

#include <algorithm>

#include <c10/core/TensorImpl.h>
#include <torch/csrc/autograd/variable.h>

namespace daceml {

enum Attached : int { nothing = 0, gradient = 1, hook = 2 };

// The union over the tensors of: a gradient is there; a hook is, or was, registered.
inline int attached(void* const* tensors, int64_t count) {
  int found = nothing;
  for (int64_t i = 0; i < count; ++i) {
    auto* meta = static_cast<const c10::TensorImpl*>(tensors[i])->autograd_meta();
    if (meta == nullptr) continue;
    const auto* leaf = static_cast<const torch::autograd::AutogradMeta*>(meta);
    if (leaf->grad_.defined()) found |= gradient;
    if (!leaf->hooks_.empty() || leaf->post_acc_grad_hooks_ != nullptr) found |= hook;
  }
  return found;
}

// From here on, changes of `owner` in place count as changes of a tensor that has its memory.
inline void share_version(void* tensor, const void* owner) {
  static_cast<c10::TensorImpl*>(tensor)->set_version_counter(static_cast<const c10::TensorImpl*>(owner)->version_counter());
}

// True if one of the tensors at these positions shares its storage with one of `others`.
inline bool shared(void* const* tensors, const int* positions, int64_t count, void* const* others, int64_t all) {
  const auto storage = [](const void* tensor) -> const void* {
    const auto* impl = static_cast<const c10::TensorImpl*>(tensor);
    return impl->has_storage() ? impl->unsafe_storage().unsafeGetStorageImpl() : nullptr;
  };
  for (int64_t i = 0; i < count; ++i) {
    const void* own = storage(tensors[positions[i]]);
    if (own != nullptr && std::any_of(others, others + all, [&](const void* other) { return storage(other) == own; })) return true;
  }
  return false;
}

}  // namespace daceml
