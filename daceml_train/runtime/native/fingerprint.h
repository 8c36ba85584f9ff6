// A number that changes when tensors do: looked at before every run of a program that depends on prepared parameters.
#pragma once

#include <cstring>

#include <c10/core/TensorImpl.h>

#include "layout.h"

namespace daceml {

constexpr int64_t whole = 512;   // words up to which a tensor is looked at as a whole
constexpr int64_t samples = 8;  // words that are looked at of a larger one

inline uint64_t mixed(uint64_t state, uint64_t word) {
  state = (state ^ word) * 0x9E3779B97F4A7C15ull;
  return state ^ (state >> 29);
}

// Address, version, and words of each tensor, spread evenly over a large one: writes through `.data` or NumPy move no
// version.
// False if one of the tensors has no version to look at, or no memory.
inline bool fingerprint(void* const* tensors, int64_t count, uint64_t& state) {
  for (int64_t i = 0; i < count; ++i) {
    auto& tensor = *static_cast<c10::TensorImpl*>(tensors[i]);
    if (tensor.is_inference() || !tensor.has_storage()) return false;
    const auto* data = static_cast<const char*>(tensor.data());
    state = mixed(mixed(state, reinterpret_cast<uint64_t>(data)), tensor.version_counter().current_version());
    int64_t last = 0;
    for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
    const int64_t words = tensor.numel() == 0 || data == nullptr ? 0 : (last + 1) * static_cast<int64_t>(tensor.itemsize()) / 4;
    const int64_t taken = words <= whole ? words : samples;
    for (int64_t k = 0; k < taken; ++k) {
      uint32_t word;
      std::memcpy(&word, data + 4 * (taken == 1 ? 0 : k * (words - 1) / (taken - 1)), sizeof word);
      state = mixed(state, word);
    }
  }
  return true;
}

}  // namespace daceml
