// The values of a plan: where each one lives, and the tensors laid over them for ATen calls.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include <c10/core/CPUAllocator.h>

#include "input.h"
#include "layout.h"

namespace daceml {

enum class Home : uint8_t { unset, arena, input, fresh, result };

struct Slot {
  Home home = Home::unset;
  bool is_mutable = false;
  bool is_opaque = false;  // an input whose layout is a library's own: only calls read it
  int index = -1;          // of the input
  int64_t offset = 0;  // bytes into the arena; of a result slot, where memory lies ready for it, -1 if nowhere
  Layout layout;       // all but arena slots
  char* pointer = nullptr;
  at::Tensor value;    // fresh, result and opaque slots, while they live

  bool owned() const { return home == Home::fresh || home == Home::result; }
};

struct View {
  int slot;
  int64_t offset;  // bytes
  Layout layout;
  char* bound = nullptr;
  at::Tensor tensor;
};

class Values {
 public:
  explicit Values(int count) : slots(count) {}
  std::vector<Slot> slots;
  std::vector<View> views;
  char* arena = nullptr;  // while the plan runs

  Slot& slot(int index) {
    TORCH_CHECK_VALUE(index >= 0 && index < static_cast<int>(slots.size()), "there is no slot ", index, ": the plan has ",
                      slots.size());
    return slots[index];
  }

  View& view(int index) {
    TORCH_CHECK_VALUE(index >= 0 && index < static_cast<int>(views.size()), "there is no view ", index);
    return views[index];
  }

  // The slot, to be given its home; each may be declared once.
  Slot& declare(int index, Home home) {
    Slot& declared = slot(index);
    TORCH_CHECK_VALUE(declared.home == Home::unset, "slot ", index, " is declared twice");
    declared.home = home;
    return declared;
  }

  int add_view(int index, int64_t offset, Layout layout) {
    const Slot& seen = slot(index);
    TORCH_CHECK_VALUE(seen.home != Home::unset, "declare slot ", index, " before its views");
    TORCH_CHECK_VALUE(offset >= 0 && (seen.home == Home::arena || offset + layout.bytes <= seen.layout.bytes),
                      "a view of ", layout.bytes, " bytes at offset ", offset, " leaves slot ", index, " of ",
                      seen.layout.bytes, " bytes");
    views.push_back({index, offset, std::move(layout), nullptr, {}});
    return static_cast<int>(views.size()) - 1;
  }

  // The tensor of a view over the slot's present memory. It does not keep that memory alive.
  at::Tensor& bind(int index) {
    View& view = views[index];
    if (C10_UNLIKELY(slots[view.slot].is_opaque)) return slots[view.slot].value;
    char* pointer = slots[view.slot].pointer;
    // Pointer arithmetic on the null of an empty tensor would make it look bound.
    if (pointer != nullptr) pointer += view.offset;
    if (C10_LIKELY(pointer == view.bound && view.tensor.defined())) return view.tensor;
    // An operator written in Python may have kept the tensor or its storage: that one must not move.
    if (view.tensor.defined() && view.tensor.use_count() == 1 && view.tensor.storage().use_count() == 1) {
      view.tensor.storage().unsafeGetStorageImpl()->set_data_ptr_noswap({pointer, c10::Device(c10::kCPU)});
    } else {
      view.tensor = borrow(pointer, view.layout);
    }
    view.bound = pointer;
    return view.tensor;
  }

  // After a call of an operator that is written in Python, which may have kept the tensor of a view: that one gets memory of
  // its own, with the elements that it has now.
  void part(int index) {
    View& view = views[index];
    if (slots[view.slot].is_opaque || !view.tensor.defined()) return;
    if (view.tensor.use_count() == 1 && view.tensor.storage().use_count() == 1) return;
    const auto bytes = static_cast<size_t>(view.layout.bytes);
    c10::DataPtr own = c10::GetCPUAllocator()->allocate(bytes);
    if (bytes > 0) std::memcpy(own.get(), view.bound, bytes);
    view.tensor.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(own));
    view.tensor.reset();
    view.bound = nullptr;
  }

  void own(int index, at::Tensor value) {
    Slot& slot = slots[index];
    slot.pointer = static_cast<char*>(value.data_ptr());
    slot.value = std::move(value);
  }

  void drop(int index) {
    slots[index].value.reset();
    slots[index].pointer = nullptr;
  }
};

}  // namespace daceml
