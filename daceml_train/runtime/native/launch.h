// What a plan does, step by step: kernels, matmuls, boxed calls, releases, copies; control flow is in control.h.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/baddbmm_cpu_dispatch.h>
#include <ATen/ops/bmm_cpu_dispatch.h>
#include <ATen/ops/mm_cpu_dispatch.h>

#include "few_rows.h"
#include "values.h"

namespace daceml {

enum class Step : uint8_t { kernel, product, call, release, copy, control, levels };

// `index` finds the step's own data; `uses` and `defines` are slots, for the check and the allocations.
struct Launch {
  Step step;
  int tag;
  int index;
  std::vector<int> uses, defines;
  std::vector<int> fresh;  // allocated just before this launch
};

// Slot and bytes into it.
struct Place {
  int slot;
  int64_t offset;
};

using KernelFunction = void (*)(void** pointers, const int64_t* integers);

struct Kernel {
  KernelFunction function;
  std::vector<Place> pointers;
  std::vector<int64_t> integers;

  void run(const Values& values, void** scratch) const {
    size_t i = 0;
    for (const Place& place : pointers) scratch[i++] = values.slots[place.slot].pointer + place.offset;
    function(scratch, integers.data());
  }
};

// out = alpha * (a @ b) + beta * bias; views. The CPU kernels are called directly: the dispatcher would find the same ones.
struct Product {
  enum class Kind : int { mm, addmm, bmm, baddbmm };
  Kind kind;
  int out, bias, a, b;
  c10::Scalar beta, alpha;

  // `varies`: for any number of rows, so that no library was chosen for it.
  void run(Values& values, bool varies) const {
    at::Tensor& result = values.bind(out);
    const at::Tensor& left = values.bind(a);
    const at::Tensor& right = values.bind(b);
    if (varies && kind == Kind::mm && few(result, left, right)) {
      FewRows::run(left.const_data_ptr<float>(), right.const_data_ptr<float>(), result.data_ptr<float>(), result.size(0),
                   result.size(1), left.size(1), transposed(right));
      return;
    }
    switch (kind) {
      case Kind::mm: at::cpu::mm_out(result, left, right); break;
      case Kind::bmm: at::cpu::bmm_out(result, left, right); break;
      case Kind::addmm: at::cpu::addmm_out(result, values.bind(bias), left, right, beta, alpha); break;
      case Kind::baddbmm: at::cpu::baddbmm_out(result, values.bind(bias), left, right, beta, alpha); break;
    }
  }

 private:
  static bool transposed(const at::Tensor& matrix) { return matrix.stride(0) == 1 && matrix.stride(1) == matrix.size(0); }

  static bool few(const at::Tensor& result, const at::Tensor& left, const at::Tensor& right) {
    return result.scalar_type() == at::kFloat && left.size(1) > 0 && result.is_contiguous() && left.is_contiguous() &&
           (transposed(right) || right.is_contiguous()) && FewRows::serves(result.size(0), transposed(right));
  }
};

// Copies that do not depend on each other.
struct Copy {
  struct Part {
    Place to, from;
    int64_t bytes;
  };
  std::vector<Part> parts;

  void run(const Values& values) const {
    for (const auto& [to, from, bytes] : parts) {
      if (bytes == 0) continue;
      std::memcpy(values.slots[to.slot].pointer + to.offset, values.slots[from.slot].pointer + from.offset,
                  static_cast<size_t>(bytes));
    }
  }
};

}  // namespace daceml
