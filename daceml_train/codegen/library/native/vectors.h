// Vectors as wide as the processor's registers, and transposes of squares of them. gcc computes on wider ones part by part,
// through memory, at a tenth of the speed.
#pragma once
#include <stdint.h>

namespace vm {

#if defined(__AVX512F__)
constexpr int VECTOR = 64, REGISTERS = 32;  // bytes of a vector; how many there are
#elif defined(__AVX__)
constexpr int VECTOR = 32, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int VECTOR = 16, REGISTERS = 32;
#else
constexpr int VECTOR = 16, REGISTERS = 16;
#endif

template <typename T> struct Lanes {
  typedef T type __attribute__((vector_size(VECTOR), aligned(sizeof(T)), may_alias));
  static constexpr int64_t count = VECTOR / sizeof(T);
};

// Blocks of STEP rows and columns off the diagonal change places.
template <int STEP> static inline void exchange(Lanes<float>::type* x) {
  constexpr int LANES = Lanes<float>::count;
  typedef int32_t Places __attribute__((vector_size(VECTOR)));
  Places low, high;
#pragma GCC unroll 16
  for (int l = 0; l < LANES; ++l) {
    low[l] = l & STEP ? LANES + l - STEP : l;
    high[l] = l & STEP ? LANES + l : l + STEP;
  }
#pragma GCC unroll 16
  for (int i = 0; i < LANES; ++i)
    if (!(i & STEP)) {
      const Lanes<float>::type a = x[i], b = x[i + STEP];
      x[i] = __builtin_shuffle(a, b, low);
      x[i + STEP] = __builtin_shuffle(a, b, high);
    }
}

// A square of numbers, one vector for each row, becomes its transpose.
static inline void transpose(Lanes<float>::type* x) {
  constexpr int LANES = Lanes<float>::count;
  if (LANES >= 16) exchange<8 % LANES>(x);
  if (LANES >= 8) exchange<4 % LANES>(x);
  exchange<2>(x);
  exchange<1>(x);
}

}  // namespace vm
