// Control flow: plans that run as the bodies of a branch or a loop of another plan.
#pragma once

#include <cstring>
#include <vector>

#include "values.h"

namespace daceml {

class Plan;

// Bodies take the states, a slice of each array, and what is shared, in this order; all are views. Their outputs are dense.
struct Control {
  enum class Kind : int { cond, scan, loop };
  struct Slices {
    int view;        // of the first slice
    int64_t stride;  // bytes to the next
  };
  Kind kind;
  std::vector<Plan*> bodies;  // cond: then, orelse; scan: body; loop: condition, body
  int condition;              // of cond, a view
  std::vector<int> states;
  std::vector<Slices> slices;
  std::vector<int> shared, results;
  int64_t trips;
  bool reverse;

  std::vector<int> views() const {
    std::vector<int> all(states);
    all.insert(all.end(), shared.begin(), shared.end());
    for (const Slices& array : slices) all.push_back(array.view);
    if (condition >= 0) all.push_back(condition);
    return all;
  }

  void run(Values& values) const {
    std::vector<void*> fixed;
    for (int view : shared) fixed.push_back(values.bind(view).unsafeGetTensorImpl());
    if (kind == Kind::cond) {
      const bool holds = *values.bind(condition).const_data_ptr<bool>();
      keep(values, call(*bodies[holds ? 0 : 1], fixed));
    } else {
      keep(values, kind == Kind::scan ? scan(values, fixed) : loop(values, fixed));
    }
  }

 private:
  std::vector<at::Tensor> call(Plan& body, const std::vector<void*>& inputs) const;

  void keep(Values& values, std::vector<at::Tensor> made) const {
    TORCH_CHECK(made.size() == results.size(), "control flow makes ", made.size(), " results, ", results.size(),
                " were expected");
    for (size_t i = 0; i < made.size(); ++i) values.own(results[i], std::move(made[i]));
  }

  // Copies: a loop of no steps hands them out, and what it hands out is nobody else's.
  std::vector<at::Tensor> first_states(Values& values) const {
    std::vector<at::Tensor> first;
    for (size_t i = 0; i < states.size(); ++i) {
      first.push_back(allocate(values.slot(results[i]).layout));
      first.back().copy_(values.bind(states[i]));
    }
    return first;
  }

  static void append(std::vector<void*>& inputs, const std::vector<at::Tensor>& tensors) {
    for (const at::Tensor& tensor : tensors) inputs.push_back(tensor.unsafeGetTensorImpl());
  }

  std::vector<at::Tensor> scan(Values& values, const std::vector<void*>& fixed) const {
    std::vector<at::Tensor> state = first_states(values), cut, stacks;
    for (size_t i = states.size(); i < results.size(); ++i) stacks.push_back(allocate(values.slot(results[i]).layout));
    for (const Slices& array : slices) cut.push_back(borrow(nullptr, values.view(array.view).layout));
    for (int64_t done = 0; done < trips; ++done) {
      const int64_t step = reverse ? trips - 1 - done : done;
      std::vector<void*> inputs;
      append(inputs, state);
      for (size_t i = 0; i < slices.size(); ++i) {
        const View& view = values.view(slices[i].view);
        char* pointer = values.slot(view.slot).pointer + view.offset + step * slices[i].stride;
        cut[i].storage().unsafeGetStorageImpl()->set_data_ptr_noswap({pointer, c10::Device(c10::kCPU)});
      }
      append(inputs, cut);
      inputs.insert(inputs.end(), fixed.begin(), fixed.end());
      std::vector<at::Tensor> made = call(*bodies[0], inputs);
      TORCH_CHECK(made.size() == results.size(), "the body of a loop makes ", made.size(), " values");
      for (size_t i = 0; i < stacks.size(); ++i) {
        const at::Tensor& value = made[state.size() + i];
        const size_t bytes = value.nbytes();
        if (bytes > 0) std::memcpy(static_cast<char*>(stacks[i].data_ptr()) + step * bytes, value.const_data_ptr(), bytes);
      }
      for (size_t i = 0; i < state.size(); ++i) state[i] = std::move(made[i]);
    }
    for (at::Tensor& stack : stacks) state.push_back(std::move(stack));
    return state;
  }

  std::vector<at::Tensor> loop(Values& values, const std::vector<void*>& fixed) const {
    std::vector<at::Tensor> state = first_states(values);
    while (true) {
      std::vector<void*> inputs;
      append(inputs, state);
      inputs.insert(inputs.end(), fixed.begin(), fixed.end());
      if (!*call(*bodies[0], inputs).at(0).const_data_ptr<bool>()) return state;
      state = call(*bodies[1], inputs);
    }
  }
};

}  // namespace daceml
