// Functions of generated kernels. Those on float are written so that gcc vectorizes them in `omp simd` loops; they
// keep NaN, give 0 and infinity where they should, and are accurate to a few units in the last place (tests/codegen).
// Nothing is included but <stdint.h>: what a kernel costs to compile is mostly what its header includes.
#pragma once
#include <stdint.h>
#define VM static inline __attribute__((always_inline))

namespace vm {

VM float bits(int32_t i) { float f; __builtin_memcpy(&f, &i, 4); return f; }
VM int32_t bits(float f) { int32_t i; __builtin_memcpy(&i, &f, 4); return i; }
VM double bits64(int64_t i) { double f; __builtin_memcpy(&f, &i, 8); return f; }

// ---- 16-bit floats ------------------------------------------------------------------------------------------------
VM float from_bfloat16(uint16_t h) { return bits((int32_t)((uint32_t)h << 16)); }
VM uint16_t to_bfloat16(float x) {  // to nearest, ties to even
  uint32_t u = (uint32_t)bits(x);
  uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return (uint16_t)(x != x ? 0x7fc0u : rounded);
}
VM float from_float16(uint16_t h) { _Float16 f; __builtin_memcpy(&f, &h, 2); return (float)f; }
VM uint16_t to_float16(float x) { _Float16 f = (_Float16)x; uint16_t h; __builtin_memcpy(&h, &f, 2); return h; }

// ---- comparisons --------------------------------------------------------------------------------------------------
// NaN if any is. Two selections: GCC makes branches of one with two conditions, and no vectors.
template <typename T> VM T max(T a, T b) { const T larger = a > b ? a : b; return a != a ? a : larger; }
template <typename T> VM T min(T a, T b) { const T smaller = a < b ? a : b; return a != a ? a : smaller; }
template <typename T> VM bool isnan(T a) { return a != a; }
VM bool isinf(float a) { return __builtin_fabsf(a) == __builtin_inff(); }
VM bool isinf(double a) { return __builtin_fabs(a) == __builtin_inf(); }
template <typename T> VM bool isinf(T) { return false; }
template <typename T> VM bool logical_and(T a, T b) { return (a != 0) & (b != 0); }
template <typename T> VM bool logical_or(T a, T b) { return (a != 0) | (b != 0); }
template <typename T> VM bool logical_not(T a) { return a == 0; }
VM bool is_lane(int64_t lane, int64_t value) {  // lanes number less than 2^31
  return (int32_t)lane == ((uint64_t)value < 0x80000000u ? (int32_t)value : -1);
}
VM float abs(float a) { return __builtin_fabsf(a); }
VM double abs(double a) { return __builtin_fabs(a); }
template <typename T> VM T abs(T a) { return a < 0 ? -a : a; }
VM float sign(float a) { float s = a > 0.0f ? 1.0f : 0.0f; return a < 0.0f ? -1.0f : s; }
VM double sign(double a) { double s = a > 0.0 ? 1.0 : 0.0; return a < 0.0 ? -1.0 : s; }
template <typename T> VM T sign(T a) { return (T)((a > 0) - (a < 0)); }

// ---- division and rounding ----------------------------------------------------------------------------------------
VM float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
VM double fused(double a, double b, double c) { return __builtin_fma(a, b, c); }
// Rounded once, though the flags allow `a / b` to become a product with the reciprocal, which its remainder mends
// (Markstein, 1990). Zeros keep their signs; infinities and NaN have no remainder.
template <typename T> VM T divide(T a, T b) {
  const T r = 1 / b, q = a / b, rest = fused(-b, q, a), y = fused(rest, r, q);
  return (rest != 0) & (y - y == 0) ? y : q;
}
VM float floor(float a) { return __builtin_floorf(a); }
VM double floor(double a) { return __builtin_floor(a); }
VM float ceil(float a) { return __builtin_ceilf(a); }
VM double ceil(double a) { return __builtin_ceil(a); }
VM float trunc(float a) { return __builtin_truncf(a); }
VM double trunc(double a) { return __builtin_trunc(a); }
VM float round(float a) { return __builtin_rintf(a); }  // ties to even
VM double round(double a) { return __builtin_rint(a); }
VM float fmod(float a, float b) {  // exact while the quotient is below 2^29
  double x = a, y = __builtin_fabs((double)b);
  double r = x - y * __builtin_trunc(x / y);
  r = r * x < 0 ? r + (x < 0 ? -y : y) : r;  // the quotient was rounded up
  r = __builtin_fabs(r) >= y ? r - (x < 0 ? -y : y) : r;  // or down, as a product with the reciprocal may be
  return y == __builtin_inf() && x - x == 0 ? a : (float)__builtin_copysign(r, x);
}
VM double fmod(double a, double b) { return __builtin_fmod(a, b); }
template <typename T> VM T fmod(T a, T b) { return b == 0 || b == (T)-1 ? 0 : (T)(a % b); }
template <typename T> VM T remainder(T a, T b) {  // with the sign of b
  T r = fmod(a, b), s = (T)(r + b);
  return ((r < 0) & (b > 0)) | ((r > 0) & (b < 0)) ? s : r;
}
template <typename T> VM T quotient(T a, T b) {  // rounded down; from the remainder, which rounding does not touch
  T r = fmod(a, b), q = (a - r) / b;
  q = (r != 0) & ((b < 0) != (r < 0)) ? q - 1 : q;
  T whole = floor(q);
  whole = q - whole > (T)0.5 ? whole + 1 : whole;
  return b == 0 ? a / b : q == 0 ? 0 * (a / b) : whole;
}
VM float floor_divide(float a, float b) { return quotient<float>(a, b); }
VM double floor_divide(double a, double b) { return quotient<double>(a, b); }
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
VM float sqrt(float a) { return __builtin_sqrtf(a); }
VM double sqrt(double a) { return __builtin_sqrt(a); }
VM float rsqrt(float a) { return 1.0f / __builtin_sqrtf(a); }
VM double rsqrt(double a) { return 1.0 / __builtin_sqrt(a); }

// ---- exponentials and logarithms (coefficients: Cephes) -----------------------------------------------------------
VM float exp(float x) {
  // Below -104 compute with 0, not with -104, which would pass through slow denormals. Bits instead of a choice: from
  // a choice gcc would make a branch with constants, and then not vectorize the loop.
  int32_t kept = -(int32_t)!(x < -104.0f);
  float c = bits(bits(x) & kept);
  float t = __builtin_fmaf(c, 1.44269504088896341f, 12582912.0f);  // its last bits are the nearest integer
  float n = t - 12582912.0f;
  float r = __builtin_fmaf(n, -0.693359375f, c);
  r = __builtin_fmaf(n, 2.12194440e-4f, r);
  float p = 1.9875691500e-4f;
  p = __builtin_fmaf(p, r, 1.3981999507e-3f);
  p = __builtin_fmaf(p, r, 8.3334519073e-3f);
  p = __builtin_fmaf(p, r, 4.1665795894e-2f);
  p = __builtin_fmaf(p, r, 1.6666665459e-1f);
  p = __builtin_fmaf(p, r, 5.0000001201e-1f);
  p = __builtin_fmaf(p, r * r, r) + 1.0f;
  bool small = c < -86.0f;  // 2^64 times the result is no denormal
  int32_t k = (int32_t)((uint32_t)bits(t) << 23) + (small ? 64 << 23 : 0);
  float y = bits(bits(p) + k) * (small ? 5.42101086242752217e-20f : 1.0f);
  y = x <= 88.7228317f ? y : x + __builtin_inff();
  return bits(bits(y) & kept);
}
VM float log(float x) {
  bool small = x < 1.17549435e-38f;
  float s = small ? x * 8388608.0f : x;
  int32_t i = bits(s);
  int32_t e = ((i >> 23) & 0xff) - 126 - (small ? 23 : 0);
  float m = bits((i & 0x007fffff) | 0x3f000000);  // in [0.5, 1)
  bool low = m < 0.707106781186547524f;
  float f = (low ? m + m : m) - 1.0f;
  float n = (float)(low ? e - 1 : e);
  float z = f * f;
  float p = 7.0376836292e-2f;
  p = __builtin_fmaf(p, f, -1.1514610310e-1f);
  p = __builtin_fmaf(p, f, 1.1676998740e-1f);
  p = __builtin_fmaf(p, f, -1.2420140846e-1f);
  p = __builtin_fmaf(p, f, 1.4249322787e-1f);
  p = __builtin_fmaf(p, f, -1.6668057665e-1f);
  p = __builtin_fmaf(p, f, 2.0000714765e-1f);
  p = __builtin_fmaf(p, f, -2.4999993993e-1f);
  p = __builtin_fmaf(p, f, 3.3333331174e-1f);
  float y = p * f * z;
  y = __builtin_fmaf(n, -2.12194440e-4f, y);
  y = __builtin_fmaf(-0.5f, z, y);
  y = __builtin_fmaf(n, 0.693359375f, f + y);
  y = x == 0.0f ? -__builtin_inff() : y;
  y = x < 0.0f ? __builtin_nanf("") : y;
  return (x == __builtin_inff() || x != x) ? x : y;
}
VM float log1p(float x) {  // Kahan: the rounding of 1 + x cancels
  float u = 1.0f + x;
  float d = u - 1.0f;
  float y = log(u) * (x / (d == 0.0f ? 1.0f : d));
  y = d == 0.0f ? x : y;
  return x == __builtin_inff() ? x : x == -1.0f ? -__builtin_inff() : y;
}
VM float expm1(float x) {
  float z = x * x;
  float p = 2.7557319e-6f;  // Taylor, for |x| <= 0.5
  p = __builtin_fmaf(p, x, 2.4801587e-5f);
  p = __builtin_fmaf(p, x, 1.9841270e-4f);
  p = __builtin_fmaf(p, x, 1.3888889e-3f);
  p = __builtin_fmaf(p, x, 8.3333333e-3f);
  p = __builtin_fmaf(p, x, 4.1666667e-2f);
  p = __builtin_fmaf(p, x, 1.6666667e-1f);
  p = __builtin_fmaf(p, x, 0.5f);
  float near = __builtin_fmaf(p, z, x);
  float far = exp(x) - 1.0f;
  return __builtin_copysignf(__builtin_fabsf(x) <= 0.5f ? near : far, x);  // -0 is not its sum with 0
}
VM float sigmoid(float x) { return 1.0f / (1.0f + exp(-x)); }
VM float tanh(float x) {
  float a = __builtin_fabsf(x), z = x * x;
  float p = -5.70498872745e-3f;
  p = __builtin_fmaf(p, z, 2.06390887954e-2f);
  p = __builtin_fmaf(p, z, -5.37397155531e-2f);
  p = __builtin_fmaf(p, z, 1.33314422036e-1f);
  p = __builtin_fmaf(p, z, -3.33332819422e-1f);
  float near = __builtin_fmaf(p * z, a, a);
  float far = 1.0f - 2.0f / (exp(2.0f * a) + 1.0f);
  return __builtin_copysignf(a < 0.625f ? near : far, x);
}
VM float erf(float x) {  // 1 - exp(polynomial) beyond 0.93, an odd polynomial below (N. Juffa)
  float a = __builtin_fabsf(x), z = x * x;
  float r = __builtin_fmaf(-1.72853470e-5f, a, 3.83197126e-4f);
  float u = __builtin_fmaf(-3.88396438e-3f, a, 2.42546219e-2f);
  r = __builtin_fmaf(r, z, u);
  r = __builtin_fmaf(r, a, -1.06777877e-1f);
  r = __builtin_fmaf(r, a, -6.34846687e-1f);
  r = __builtin_fmaf(r, a, -1.28717512e-1f);
  r = __builtin_fmaf(r, a, -a);
  float far = __builtin_copysignf(1.0f - exp(r), x);
  float p = -5.96761703e-4f;
  p = __builtin_fmaf(p, z, 4.99119423e-3f);
  p = __builtin_fmaf(p, z, -2.67681349e-2f);
  p = __builtin_fmaf(p, z, 1.12819925e-1f);
  p = __builtin_fmaf(p, z, -3.76125336e-1f);
  p = __builtin_fmaf(p, z, 1.28379166e-1f);
  return a > 0.927734375f ? far : __builtin_fmaf(p, x, x);
}

// ---- trigonometry -------------------------------------------------------------------------------------------------
VM float sine(float x, int32_t quarter) {  // sin(x + quarter * pi / 2)
  double n = __builtin_rint((double)x * 0.63661977236758134308);
  float r = n == 0 ? x : (float)((double)x - n * 1.57079632679489661923);
  int32_t q = ((int32_t)n + quarter) & 3;
  float z = r * r;
  float s = __builtin_fmaf(__builtin_fmaf(-1.9515295891e-4f, z, 8.3321608736e-3f), z, -1.6666654611e-1f);
  s = r == 0.0f ? r : __builtin_fmaf(s * z, r, r);
  float c = __builtin_fmaf(__builtin_fmaf(2.443315711809948e-5f, z, -1.388731625493765e-3f), z, 4.166664568298827e-2f);
  c = __builtin_fmaf(c * z, z, __builtin_fmaf(-0.5f, z, 1.0f));
  float y = (q & 1) ? c : s;
  return (q & 2) ? -y : y;
}
VM float sin(float x) { return sine(x, 0); }
VM float cos(float x) { return sine(x, 1); }
VM float tan(float x) { return sine(x, 0) / sine(x, 1); }
VM float atan(float x) {
  float a = __builtin_fabsf(x);
  bool far = a > 2.414213562373095f, middle = a > 0.4142135623730950f;
  float u = far ? -1.0f / a : middle ? (a - 1.0f) / (a + 1.0f) : a;
  float base = far ? 1.5707963267948966f : middle ? 0.7853981633974483f : 0.0f;
  float z = u * u;
  float p = 8.05374449538e-2f;
  p = __builtin_fmaf(p, z, -1.38776856032e-1f);
  p = __builtin_fmaf(p, z, 1.99777106478e-1f);
  p = __builtin_fmaf(p, z, -3.33329491539e-1f);
  return __builtin_copysignf(base + __builtin_fmaf(p * z, u, u), x);
}
VM float pow(float x, float y) { return __builtin_powf(x, y); }

VM double exp(double x) { return __builtin_exp(x); }
VM double log(double x) { return __builtin_log(x); }
VM double log1p(double x) { return __builtin_log1p(x); }
VM double expm1(double x) { return __builtin_expm1(x); }
VM double sigmoid(double x) { return 1.0 / (1.0 + __builtin_exp(-x)); }
VM double tanh(double x) { return __builtin_tanh(x); }
VM double erf(double x) { return __builtin_erf(x); }
VM double sin(double x) { return __builtin_sin(x); }
VM double cos(double x) { return __builtin_cos(x); }
VM double tan(double x) { return __builtin_tan(x); }
VM double atan(double x) { return __builtin_atan(x); }
VM double pow(double x, double y) { return __builtin_pow(x, y); }

// ---- calls of the C library: seldom used, not vectorized ------------------------------------------------------------
VM float asin(float x) { return __builtin_asinf(x); }
VM double asin(double x) { return __builtin_asin(x); }
VM float acos(float x) { return __builtin_acosf(x); }
VM double acos(double x) { return __builtin_acos(x); }
VM float asinh(float x) { return __builtin_asinhf(x); }
VM double asinh(double x) { return __builtin_asinh(x); }
VM float acosh(float x) { return __builtin_acoshf(x); }
VM double acosh(double x) { return __builtin_acosh(x); }
VM float atanh(float x) { return __builtin_atanhf(x); }
VM double atanh(double x) { return __builtin_atanh(x); }
VM float exp2(float x) { return __builtin_exp2f(x); }
VM double exp2(double x) { return __builtin_exp2(x); }
VM float log2(float x) { return __builtin_log2f(x); }
VM double log2(double x) { return __builtin_log2(x); }
VM float log10(float x) { return __builtin_log10f(x); }
VM double log10(double x) { return __builtin_log10(x); }
VM float atan2(float x, float y) { return __builtin_atan2f(x, y); }
VM double atan2(double x, double y) { return __builtin_atan2(x, y); }
VM float hypot(float x, float y) { return __builtin_hypotf(x, y); }
VM double hypot(double x, double y) { return __builtin_hypot(x, y); }
VM float copysign(float x, float y) { return __builtin_copysignf(x, y); }
VM double copysign(double x, double y) { return __builtin_copysign(x, y); }

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

}  // namespace vm
