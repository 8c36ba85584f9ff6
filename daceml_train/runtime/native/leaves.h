// What others have attached to the leaves of autograd: looked at before every training step, so without Python.
#pragma once

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

}  // namespace daceml
