// Vectors of 1 to 16 floats for kernels whose accumulators stay in registers; `codegen/library/tiles.py` writes them.
#pragma once
#include <cmath>
#include <cstring>
#include "kernel.h"

namespace tiles {

#define TILE_LANES(n)                                                        \
  typedef float v##n __attribute__((vector_size(4 * n)));                    \
  static inline v##n ld##n(const float* p) {                                 \
    v##n r;                                                                  \
    memcpy(&r, p, 4 * n);                                                    \
    return r;                                                                \
  }                                                                          \
  static inline void st##n(float* p, int64_t step, v##n x) {                 \
    if (step == 1)                                                           \
      memcpy(p, &x, 4 * n);                                                  \
    else                                                                     \
      for (int l = 0; l < n; ++l) p[l * step] = x[l];                        \
  }                                                                          \
  static inline v##n bc##n(float x) { return x - (v##n){}; }
TILE_LANES(16) TILE_LANES(8) TILE_LANES(4) TILE_LANES(2)
typedef float v1;
static inline float ld1(const float* p) { return *p; }
static inline void st1(float* p, int64_t, float x) { *p = x; }
static inline float bc1(float x) { return x; }

// NaN stays, and the second of equal numbers is returned, as in the kernels that are generated from a plan.
template <typename V> static inline V larger(V a, V b) {
  V r = a > b ? a : b;
  return a != a ? a : r;
}
template <typename V> static inline V smaller(V a, V b) {
  V r = a < b ? a : b;
  return a != a ? a : r;
}
template <typename V> static inline V absolute(V a) { return a < 0 ? -a : a; }

// Rounded once: see native/vector_math.h.
template <typename V> static inline V divide(V a, V b) {
  constexpr int n = sizeof(V) / 4;
  float x[n], y[n];
  memcpy(x, &a, sizeof(V));
  memcpy(y, &b, sizeof(V));
#pragma omp simd
  for (int i = 0; i < n; ++i) y[i] = vm::divide(x[i], y[i]);
  V r;
  memcpy(&r, y, sizeof(V));
  return r;
}

// A function of one number, for every lane.
template <typename V, typename F> static inline V each(V a, F f) {
  constexpr int n = sizeof(V) / 4;
  float x[n], y[n];
  memcpy(x, &a, sizeof(V));
#pragma omp simd
  for (int i = 0; i < n; ++i) y[i] = f(x[i]);
  V r;
  memcpy(&r, y, sizeof(V));
  return r;
}

}  // namespace tiles
