// What the code that DaCe generates for a kernel needs, instead of all of dace/dace.h.
#pragma once
#include "team.h"
#include "vector_math.h"
#define DACE_EXPORTED extern "C" __attribute__((visibility("hidden")))

static inline int64_t int_floor(int64_t a, int64_t b) { return a / b; }
static inline int64_t vm_modulo(int64_t a, int64_t b) { return a % b; }
static inline int64_t vm_least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t vm_groups(int64_t size, int64_t group) { return (size + group - 1) / group; }
// Where part `part` of `parts` begins when `lanes` are shared out in multiples of 64, so that no two threads write to
// one cache line.
static inline int64_t vm_share(int64_t lanes, int64_t part, int64_t parts) {
  int64_t begin = part * ((((lanes + parts - 1) / parts) + 63) / 64 * 64);
  return begin < lanes ? begin : lanes;
}

// Asks for the cache lines 2 KiB after those of `count` elements, to be read, or written if W.
template <int W, typename T> static inline void vm_ahead(const T* first, int64_t count) {
  const char* lines = (const char*)first + 2048;
  for (int64_t at = 0; at < count * (int64_t)sizeof(T); at += 64) __builtin_prefetch(lines + at, W);
}

namespace vm {
template <typename T> T highest();
template <typename T> T lowest();
template <> inline float highest<float>() { return __builtin_inff(); }
template <> inline float lowest<float>() { return -__builtin_inff(); }
template <> inline double highest<double>() { return __builtin_inf(); }
template <> inline double lowest<double>() { return -__builtin_inf(); }
template <> inline int64_t highest<int64_t>() { return INT64_MAX; }
template <> inline int64_t lowest<int64_t>() { return INT64_MIN; }
template <> inline int32_t highest<int32_t>() { return INT32_MAX; }
template <> inline int32_t lowest<int32_t>() { return INT32_MIN; }
template <> inline int16_t highest<int16_t>() { return INT16_MAX; }
template <> inline int16_t lowest<int16_t>() { return INT16_MIN; }
template <> inline int8_t highest<int8_t>() { return INT8_MAX; }
template <> inline int8_t lowest<int8_t>() { return INT8_MIN; }
template <> inline uint8_t highest<uint8_t>() { return UINT8_MAX; }
template <> inline uint8_t lowest<uint8_t>() { return 0; }
template <typename T> T nan();
template <> inline float nan<float>() { return __builtin_nanf(""); }
template <> inline double nan<double>() { return __builtin_nan(""); }
}  // namespace vm
