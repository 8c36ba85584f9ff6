// A boxed call of any operator known to PyTorch's dispatcher, by name.
#pragma once

#include <string>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "argument.h"
#include "pool.h"
#include "values.h"

namespace daceml {

// Where one tensor result goes: into an owned slot, through a view into memory that exists, or nowhere.
struct Result {
  int slot = -1, view = -1;
};

class Call {
 public:
  // Throws if no such operator is registered.
  Call(const char* name, const char* overload)
      : operator_(c10::Dispatcher::singleton().findSchemaOrThrow(name, overload)), keeps_(may_keep(name)) {}

  const c10::FunctionSchema& schema() const { return operator_.schema(); }
  std::string name() const { return toString(operator_.operator_name()); }

  void add_constant(c10::IValue value) {
    const size_t position = next();
    arguments_.push_back({Kind::constant, -1, coerce(value, schema(), position), {}, {}});
  }

  void add_tensor(int view) {
    const size_t position = next();
    const auto kind = without_optional(schema().arguments()[position].type())->kind();
    if (kind == c10::TypeKind::ListType) {
      --position_;
      add_tensors({view});
      return;
    }
    TORCH_CHECK_VALUE(kind == c10::TypeKind::TensorType, place(schema(), position), " wants ",
                      schema().arguments()[position].type()->str(), ", given a view");
    arguments_.push_back({Kind::tensor, view, {}, {}, {}});
  }

  // A view of -1 stands for None, where the schema takes optional tensors.
  void add_tensors(std::vector<int> views) {
    const size_t position = next();
    const c10::TypePtr type = without_optional(schema().arguments()[position].type());
    TORCH_CHECK_VALUE(type->kind() == c10::TypeKind::ListType, place(schema(), position), " wants ", type->str(),
                      ", given a list of views");
    const c10::TypePtr element = type->expectRef<c10::ListType>().getElementType();
    TORCH_CHECK_VALUE(without_optional(element)->kind() == c10::TypeKind::TensorType, place(schema(), position), " wants ",
                      type->str(), ", given a list of views");
    for (int view : views) {
      TORCH_CHECK_VALUE(view >= 0 || element->kind() == c10::TypeKind::OptionalType, place(schema(), position),
                        " takes no None in its list");
    }
    arguments_.push_back({Kind::tensors, -1, {}, std::move(views), element});
  }

  void add_result(Result result) { results_.push_back(result); }

  // Fills in defaults of arguments left out at the end.
  void complete() {
    const auto& declared = schema().arguments();
    while (position_ < declared.size()) {
      TORCH_CHECK_VALUE(declared[position_].default_value().has_value(), place(schema(), position_),
                        " is missing and has no default");
      arguments_.push_back({Kind::constant, -1, *declared[position_].default_value(), {}, {}});
      ++position_;
    }
  }

  const std::vector<Result>& results() const { return results_; }

  // Whether another call has equal arguments but for tensors.
  bool same_constants(const Call& other) const {
    if (arguments_.size() != other.arguments_.size()) return false;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const Argument &a = arguments_[i], &b = other.arguments_[i];
      if (a.kind != b.kind || (a.kind == Kind::constant && a.constant != b.constant)) return false;
    }
    return true;
  }

  std::vector<int> views() const {
    std::vector<int> all;
    for (const Argument& argument : arguments_) {
      if (argument.kind == Kind::tensor) all.push_back(argument.view);
      for (int view : argument.views) {
        if (view >= 0) all.push_back(view);
      }
    }
    return all;
  }

  void run(Values& values) {
    torch::jit::Stack stack;
    stack.swap(stack_);  // its memory is reused; an exception leaves `stack_` empty
    stack.clear();
    try {
      for (const Argument& argument : arguments_) push(stack, argument, values);
      {
        const Offers offers(results_, values);
        operator_.callBoxed(&stack);
      }
      take(stack, values);
    } catch (...) {  // whose traceback may have what the operator was given
      stack.clear();
      part(values);
      throw;
    }
    stack.clear();
    stack_.swap(stack);
    part(values);
  }

 private:
  // Whether an operator may keep what it is given: one of PyTorch's does not, and ours keep nothing beyond a run.
  static bool may_keep(const std::string& name) {
    const std::string space = name.substr(0, name.find("::"));
    return space != "aten" && space != "mkldnn" && space != "prims" && space != "quantized" && space != "daceml";
  }

  void part(Values& values) {
    if (!keeps_) return;
    for (int view : views()) values.part(view);
  }

  // The arena's memory for results is on offer as long as this lives.
  struct Offers {
    Offers(const std::vector<Result>& results, const Values& values) {
      for (const Result& result : results) {
        if (result.slot < 0 || values.slots[result.slot].offset < 0) continue;
        const Slot& slot = values.slots[result.slot];
        Pool::offers().push_back({values.arena + slot.offset, static_cast<size_t>(slot.layout.bytes), false});
      }
    }
    ~Offers() { Pool::offers().clear(); }
    Offers(const Offers&) = delete;
    Offers& operator=(const Offers&) = delete;
  };

  enum class Kind : uint8_t { constant, tensor, tensors };
  struct Argument {
    Kind kind;
    int view;
    c10::IValue constant;
    std::vector<int> views;
    c10::TypePtr element;  // of a list of tensors
  };

  size_t next() {
    TORCH_CHECK_VALUE(position_ < schema().arguments().size(), name(), " takes ", schema().arguments().size(),
                      " arguments, given more");
    return position_++;
  }

  static void push(torch::jit::Stack& stack, const Argument& argument, Values& values) {
    if (argument.kind == Kind::constant) {
      stack.emplace_back(argument.constant);
    } else if (argument.kind == Kind::tensor) {
      stack.emplace_back(values.bind(argument.view));
    } else {
      c10::impl::GenericList list(argument.element);
      for (int view : argument.views) list.push_back(view < 0 ? c10::IValue() : c10::IValue(values.bind(view)));
      stack.emplace_back(std::move(list));
    }
  }

  // Hands the results, lists flattened, to their places.
  void take(torch::jit::Stack& stack, Values& values) {
    std::vector<c10::IValue> flat;
    for (c10::IValue& value : stack) {
      if (value.isList()) {
        for (const c10::IValue& item : value.toListRef()) flat.push_back(item);
      } else {
        flat.push_back(std::move(value));
      }
    }
    TORCH_CHECK(flat.size() >= results_.size(), name(), " returned ", flat.size(), " results, ", results_.size(),
                " were expected");
    if (flat.size() > results_.size()) {  // the program knows of no gradient that was not asked for, and of no number
      std::vector<c10::IValue> tensors;
      for (const c10::IValue& value : flat) {
        if (value.isTensor() && value.toTensor().defined()) tensors.push_back(value);
      }
      if (tensors.size() == results_.size()) flat = std::move(tensors);
    }
    for (size_t i = 0; i < results_.size(); ++i) {
      if (results_[i].slot >= 0 || results_[i].view >= 0) store(flat[i], i, values);
    }
  }

  void store(const c10::IValue& value, size_t i, Values& values) {
    const Result& result = results_[i];
    const Layout& layout = result.view >= 0 ? values.views[result.view].layout : values.slots[result.slot].layout;
    TORCH_CHECK(value.isTensor() && value.toTensor().defined(), "result ", i, " of ", name(), " is not a tensor");
    const at::Tensor& tensor = value.toTensor();
    TORCH_CHECK(is_plain(*tensor.unsafeGetTensorImpl()) && tensor.scalar_type() == layout.dtype &&
                    tensor.sizes() == c10::IntArrayRef(layout.sizes),
                "result ", i, " of ", name(), ": expected ", describe(layout), ", got ", tensor.toString(), " sizes ",
                tensor.sizes());
    if (result.view >= 0) {
      values.bind(result.view).copy_(tensor);
    } else if (layout.same_strides(tensor.strides()) && !shared(tensor, i, values) && !misplaced(tensor, i, values)) {
      values.own(result.slot, tensor);
    } else {
      at::Tensor copy = allocate(layout);
      copy.copy_(tensor);
      values.own(result.slot, std::move(copy));
    }
  }

  // True if a result lies in memory that was on offer for another one, whose life that memory's is.
  bool misplaced(const at::Tensor& tensor, size_t position, const Values& values) const {
    const auto* start = static_cast<const char*>(tensor.storage().data());
    for (size_t i = 0; i < results_.size(); ++i) {
      if (i == position || results_[i].slot < 0) continue;
      const Slot& other = values.slots[results_[i].slot];
      if (other.offset >= 0 && start == values.arena + other.offset) return true;
    }
    return false;
  }

  // True if the memory of a result belongs to an argument, or to a result stored before it.
  bool shared(const at::Tensor& tensor, size_t position, const Values& values) const {
    const auto* start = static_cast<const char*>(tensor.storage().data());
    if (start == nullptr) return false;
    const auto inside = [start](const at::Tensor& other) {
      if (!other.defined() || !other.has_storage()) return false;
      const auto* first = static_cast<const char*>(other.storage().data());
      return first != nullptr && start >= first && start < first + std::max<size_t>(other.storage().nbytes(), 1);
    };
    for (const Argument& argument : arguments_) {
      if (argument.kind == Kind::tensor && inside(values.views[argument.view].tensor)) return true;
      if (argument.kind == Kind::constant && argument.constant.isTensor() && inside(argument.constant.toTensor())) return true;
      for (int view : argument.views) {
        if (view >= 0 && inside(values.views[view].tensor)) return true;
      }
    }
    for (size_t i = 0; i < position; ++i) {
      if (results_[i].slot >= 0 && inside(values.slots[results_[i].slot].value)) return true;
    }
    return false;
  }

  c10::OperatorHandle operator_;
  std::vector<Argument> arguments_;
  std::vector<Result> results_;
  torch::jit::Stack stack_;
  size_t position_ = 0;
  bool keeps_;
};

}  // namespace daceml
