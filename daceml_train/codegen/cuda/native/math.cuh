// Functions of generated kernels on CUDA, with the names and the meaning of those in ../../native/vector_math.h.
// Elementary functions are CUDA's accurate ones, 1 to 2 units in the last place; none of the approximate intrinsics.
#pragma once
#ifndef VM_EMULATOR
#define VM_BOTH static __host__ __device__ __forceinline__
#else
#define VM_BOTH static inline
#endif

namespace vm {

VM_BOTH double bits64(int64_t i) { double f; memcpy(&f, &i, 8); return f; }
VM float bits(int32_t i) { float f; memcpy(&f, &i, 4); return f; }
VM int32_t bits(float f) { int32_t i; memcpy(&i, &f, 4); return i; }

// ---- 16-bit floats ------------------------------------------------------------------------------------------------
VM float from_bfloat16(uint16_t h) { return bits((int32_t)((uint32_t)h << 16)); }
#ifndef VM_EMULATOR
VM uint16_t to_bfloat16(float x) { uint16_t h; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(x)); return h; }
VM float from_float16(uint16_t h) { float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h)); return f; }
VM uint16_t to_float16(float x) { uint16_t h; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x)); return h; }
#else
VM uint16_t to_bfloat16(float x) {  // to nearest, ties to even
  uint32_t u = (uint32_t)bits(x);
  return (uint16_t)(x != x ? 0x7fffu : (u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
VM float from_float16(uint16_t h) { _Float16 f; memcpy(&f, &h, 2); return (float)f; }
VM uint16_t to_float16(float x) { _Float16 f = (_Float16)x; uint16_t h; memcpy(&h, &f, 2); return h; }
#endif

// ---- limits -------------------------------------------------------------------------------------------------------
template <typename T> struct Limits;  // integers
template <> struct Limits<int64_t> { static constexpr int64_t least = INT64_MIN, most = INT64_MAX; };
template <> struct Limits<int32_t> { static constexpr int32_t least = INT32_MIN, most = INT32_MAX; };
template <> struct Limits<int16_t> { static constexpr int16_t least = INT16_MIN, most = INT16_MAX; };
template <> struct Limits<int8_t> { static constexpr int8_t least = INT8_MIN, most = INT8_MAX; };
template <> struct Limits<uint8_t> { static constexpr uint8_t least = 0, most = UINT8_MAX; };
template <typename T> VM T highest() { return Limits<T>::most; }
template <typename T> VM T lowest() { return Limits<T>::least; }
template <> __device__ __forceinline__ float highest<float>() { return __builtin_huge_valf(); }
template <> __device__ __forceinline__ float lowest<float>() { return -__builtin_huge_valf(); }
template <> __device__ __forceinline__ double highest<double>() { return __builtin_huge_val(); }
template <> __device__ __forceinline__ double lowest<double>() { return -__builtin_huge_val(); }

// ---- comparisons --------------------------------------------------------------------------------------------------
template <typename T> VM T max(T a, T b) { return (a != a || a > b) ? a : b; }  // NaN if any is
template <typename T> VM T min(T a, T b) { return (a != a || a < b) ? a : b; }
template <typename T> VM bool isnan(T a) { return a != a; }
VM float abs(float a) { return fabsf(a); }
VM double abs(double a) { return fabs(a); }
template <typename T> VM T abs(T a) { return a < 0 ? -a : a; }
VM bool isinf(float a) { return fabsf(a) == __builtin_huge_valf(); }
VM bool isinf(double a) { return fabs(a) == __builtin_huge_val(); }
template <typename T> VM bool isinf(T) { return false; }
template <typename T> VM bool logical_and(T a, T b) { return (a != 0) & (b != 0); }
template <typename T> VM bool logical_or(T a, T b) { return (a != 0) | (b != 0); }
template <typename T> VM bool logical_not(T a) { return a == 0; }
VM bool is_lane(int64_t lane, int64_t value) { return lane == value; }
VM float sign(float a) { float s = a > 0.0f ? 1.0f : 0.0f; return a < 0.0f ? -1.0f : s; }
VM double sign(double a) { double s = a > 0.0 ? 1.0 : 0.0; return a < 0.0 ? -1.0 : s; }
template <typename T> VM T sign(T a) { return (T)((a > 0) - (a < 0)); }

// ---- division and rounding ----------------------------------------------------------------------------------------
template <typename T> VM T divide(T a, T b) { return a / b; }
template <typename T> VM T truncate_divide(T a, T b) { return b == 0 ? 0 : b == (T)-1 ? (T)(0 - a) : (T)(a / b); }
template <typename T> VM T pow(T a, T b) {  // of integers: wraps as multiplication does; negative powers are truncated
  if (b < 0) return a == 1 ? (T)1 : a == (T)-1 ? (b & 1 ? a : (T)1) : (T)0;
  uint64_t result = 1, base = (uint64_t)a;
  for (uint64_t n = (uint64_t)b; n != 0; n >>= 1, base *= base) result *= n & 1 ? base : 1;
  return (T)result;
}
template <typename T> VM T floor_divide(T a, T b) {
  T q = truncate_divide(a, b);
  return b == 0 ? 0 : (T)(q - ((q * b != a) & ((a < 0) != (b < 0))));
}
template <typename T> VM T fmod(T a, T b) { return b == 0 || b == (T)-1 ? 0 : (T)(a % b); }
VM float fmod(float a, float b) { return fmodf(a, b); }
VM double fmod(double a, double b) { return ::fmod(a, b); }
template <typename T> VM T quotient(T a, T b) {  // rounded down; from the remainder, which rounding does not touch
  T r = fmod(a, b), q = (a - r) / b;
  q = r != 0 && (b < 0) != (r < 0) ? q - 1 : q;
  T whole = ::floor(q);
  whole = q - whole > (T)0.5 ? whole + 1 : whole;
  return b == 0 ? a / b : q == 0 ? 0 * (a / b) : whole;
}
VM float floor_divide(float a, float b) { return quotient<float>(a, b); }
VM double floor_divide(double a, double b) { return quotient<double>(a, b); }
template <typename T> VM T remainder(T a, T b) {  // with the sign of b
  T r = fmod(a, b), s = (T)(r + b);
  return ((r < 0) & (b > 0)) | ((r > 0) & (b < 0)) ? s : r;
}

// ---- elementary functions -----------------------------------------------------------------------------------------
#define VM_UNARY(name, single, real) \
  VM float name(float x) { return single(x); } \
  VM double name(double x) { return real(x); }
#define VM_BINARY(name, single, real) \
  VM float name(float x, float y) { return single(x, y); } \
  VM double name(double x, double y) { return real(x, y); }
VM_UNARY(floor, ::floorf, ::floor)
VM_UNARY(ceil, ::ceilf, ::ceil)
VM_UNARY(trunc, ::truncf, ::trunc)
VM_UNARY(round, ::rintf, ::rint)  // ties to even
VM_UNARY(sqrt, ::sqrtf, ::sqrt)
VM float rsqrt(float x) { return 1.0f / ::sqrtf(x); }
VM double rsqrt(double x) { return 1.0 / ::sqrt(x); }
VM_UNARY(exp, ::expf, ::exp)
VM_UNARY(log, ::logf, ::log)
VM_UNARY(log1p, ::log1pf, ::log1p)
VM_UNARY(expm1, ::expm1f, ::expm1)
VM float sigmoid(float x) { return 1.0f / (1.0f + ::expf(-x)); }
VM double sigmoid(double x) { return 1.0 / (1.0 + ::exp(-x)); }
VM_UNARY(tanh, ::tanhf, ::tanh)
VM_UNARY(erf, ::erff, ::erf)
VM_UNARY(sin, ::sinf, ::sin)
VM_UNARY(cos, ::cosf, ::cos)
VM_UNARY(tan, ::tanf, ::tan)
VM_UNARY(asin, ::asinf, ::asin)
VM_UNARY(acos, ::acosf, ::acos)
VM_UNARY(atan, ::atanf, ::atan)
VM_UNARY(asinh, ::asinhf, ::asinh)
VM_UNARY(acosh, ::acoshf, ::acosh)
VM_UNARY(atanh, ::atanhf, ::atanh)
VM_UNARY(exp2, ::exp2f, ::exp2)
VM_UNARY(log2, ::log2f, ::log2)
VM_UNARY(log10, ::log10f, ::log10)
VM_BINARY(pow, ::powf, ::pow)
VM_BINARY(atan2, ::atan2f, ::atan2)
VM_BINARY(hypot, ::hypotf, ::hypot)
VM_BINARY(copysign, ::copysignf, ::copysign)

// ---- bits of integers; a shift by a negative number, or by all bits, leaves none or the sign -----------------------
template <typename T> VM T bit_and(T a, T b) { return (T)(a & b); }
template <typename T> VM T bit_or(T a, T b) { return (T)(a | b); }
template <typename T> VM T bit_xor(T a, T b) { return (T)(a ^ b); }
template <typename T> VM T bit_not(T a) { return (T)~a; }
template <typename T> VM T shift_left(T a, T b) {
  return b < 0 || b >= (T)(8 * sizeof(T)) ? (T)0 : (T)((uint64_t)a << b);
}
template <typename T> VM T shift_right(T a, T b) {
  const T most = (T)(8 * sizeof(T) - 1);
  return (T)(a >> (b < 0 || b > most ? most : b));
}

// ---- random numbers: Philox2x32-10, as in ops/random.py -----------------------------------------------------------
VM uint64_t random_key(int64_t seed, int64_t stream) {
  uint64_t z = (uint64_t)seed + 0x9E3779B97F4A7C15ull * ((uint64_t)stream + 1);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}
VM void philox(uint64_t key, uint64_t index, uint32_t& low, uint32_t& high) {
  uint32_t k = (uint32_t)key;
  low = (uint32_t)index, high = (uint32_t)(index >> 32) ^ (uint32_t)(key >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    uint64_t wide = (uint64_t)low * 0xD256D193u;
    low = (uint32_t)(wide >> 32) ^ k ^ high;
    high = (uint32_t)wide;
    k += 0x9E3779B9u;
  }
}
VM float uniform_float(uint64_t key, uint64_t index) {
  uint32_t low, high;
  philox(key, index, low, high);
  return (float)(int32_t)(low >> 8) * 5.9604644775390625e-8f;
}
VM double uniform_double(uint64_t key, uint64_t index) {
  uint32_t low, high;
  philox(key, index, low, high);
  return (double)(int64_t)(((uint64_t)(low >> 5) << 26) + (high >> 6)) * 1.1102230246251565e-16;
}

}  // namespace vm
