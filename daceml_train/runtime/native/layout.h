// The type, sizes and strides that a value is expected to have, and tensors made from them.
#pragma once

#include <sstream>
#include <string>
#include <vector>

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/core/StorageImpl.h>

namespace daceml {

// Strides in elements. `bytes` spans from the first element to the end of the last one.
struct Layout {
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  std::vector<int64_t> sizes, strides;
  int64_t elements = 0, bytes = 0;

  Layout() = default;
  Layout(int dtype_number, const int64_t* size, const int64_t* stride, int dimensions)
      : dtype(static_cast<c10::ScalarType>(dtype_number)),
        sizes(size, size + dimensions),
        strides(stride, stride + dimensions),
        elements(1) {
    measure();
  }

  // Elements and bytes, from sizes and strides.
  void measure() {
    int64_t last = 0;
    elements = 1, bytes = 0;
    for (size_t i = 0; i < sizes.size(); ++i) {
      TORCH_CHECK_VALUE(sizes[i] >= 0 && strides[i] >= 0, "sizes and strides must not be negative");
      elements *= sizes[i];
      last += (sizes[i] - 1) * strides[i];
    }
    if (elements > 0) bytes = (last + 1) * static_cast<int64_t>(c10::elementSize(dtype));
  }

  // A dimension of size 1 has no stride worth comparing, and an empty tensor has none at all.
  bool same_strides(c10::IntArrayRef given) const {
    if (elements == 0 || given == c10::IntArrayRef(strides)) return true;
    for (size_t i = 0; i < sizes.size(); ++i) {
      if (sizes[i] != 1 && strides[i] != given[i]) return false;
    }
    return true;
  }
};

inline std::string describe(c10::ScalarType dtype, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  std::ostringstream text;
  text << c10::toString(dtype) << " sizes " << sizes << " strides " << strides;
  return text.str();
}

inline std::string describe(const Layout& layout) { return describe(layout.dtype, layout.sizes, layout.strides); }

// A tensor over memory that it does not own.
inline at::Tensor borrow(char* pointer, const Layout& layout) {
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), c10::SymInt(layout.bytes), c10::DataPtr(pointer, c10::Device(c10::kCPU)),
      /*allocator=*/nullptr, /*resizable=*/false);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(std::move(storage)), c10::DispatchKeySet(c10::DispatchKey::CPU), c10::scalarTypeToTypeMeta(layout.dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(layout.sizes, layout.strides);
  return tensor;
}

// An uninitialized tensor of its own, from the pool if its gate is on.
inline at::Tensor allocate(const Layout& layout) {
  return at::Tensor(at::detail::empty_strided_cpu(layout.sizes, layout.strides, layout.dtype));
}

}  // namespace daceml
