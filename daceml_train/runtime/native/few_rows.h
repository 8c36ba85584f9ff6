// Matmuls of few rows by a transposed matrix, as cells of levels have them: MKL needs up to three times as long there.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#define FEW_ROWS_UNROLLED _Pragma("GCC unroll 8")  // sums stay in registers
#endif

namespace daceml {

// out[rows, columns] = a[rows, inner] @ b[columns, inner].T, all of them row-major. A tile of up to six rows and four columns
// is computed at once: `b` is read from memory once, and is all that takes time for the fewest rows.
struct FewRows {
  static constexpr int64_t most = 16;

#if defined(__x86_64__)
  static bool serves(int64_t rows) {
    static const bool known = __builtin_cpu_supports("avx512f");
    return known && rows <= most;
  }

  static void run(const float* a, const float* b, float* out, int64_t rows, int64_t columns, int64_t inner) {
    const int64_t blocks = (rows + 5) / 6;
    for (int64_t j = 0; j < columns; j += 4) {
      const bool whole = j + 4 <= columns;
      for (int64_t block = 0; block < blocks; ++block) {
        const int64_t first = rows * block / blocks, last = rows * (block + 1) / blocks;
        const float* from = a + first * inner;
        float* to = out + first * columns + j;
        if (whole) {
          of_rows<4>(last - first, from, b + j * inner, to, columns, inner, block == 0);
        } else {
          for (int64_t i = j; i < columns; ++i) of_rows<1>(last - first, from, b + i * inner, to + (i - j), columns, inner, block == 0);
        }
      }
    }
  }

 private:
  template <int N>
  static void of_rows(int64_t rows, const float* a, const float* b, float* out, int64_t columns, int64_t inner, bool ahead) {
    switch (rows) {
      case 1: return tile<1, N>(a, b, out, columns, inner, ahead);
      case 2: return tile<2, N>(a, b, out, columns, inner, ahead);
      case 3: return tile<3, N>(a, b, out, columns, inner, ahead);
      case 4: return tile<4, N>(a, b, out, columns, inner, ahead);
      case 5: return tile<5, N>(a, b, out, columns, inner, ahead);
      default: return tile<6, N>(a, b, out, columns, inner, ahead);
    }
  }

  template <int M, int N>
  __attribute__((target("avx512f"))) static void tile(const float* a, const float* b, float* out, int64_t columns, int64_t inner, bool ahead) {
    __m512 sums[M][N];
    FEW_ROWS_UNROLLED for (int m = 0; m < M; ++m) {
      FEW_ROWS_UNROLLED for (int n = 0; n < N; ++n) sums[m][n] = _mm512_setzero_ps();
    }
    const auto step = [&](int64_t k, __mmask16 mask) __attribute__((always_inline, target("avx512f"))) {
      __m512 right[N];
      FEW_ROWS_UNROLLED for (int n = 0; n < N; ++n) {
        right[n] = _mm512_maskz_loadu_ps(mask, b + n * inner + k);
        if (ahead) _mm_prefetch(reinterpret_cast<const char*>(b + (n + N) * inner + k), _MM_HINT_T0);
      }
      FEW_ROWS_UNROLLED for (int m = 0; m < M; ++m) {
        const __m512 left = _mm512_maskz_loadu_ps(mask, a + m * inner + k);
        FEW_ROWS_UNROLLED for (int n = 0; n < N; ++n) sums[m][n] = _mm512_fmadd_ps(left, right[n], sums[m][n]);
      }
    };
    int64_t k = 0;
    for (; k + 16 <= inner; k += 16) step(k, 0xffff);
    if (k < inner) step(k, static_cast<__mmask16>((1u << (inner - k)) - 1));
    FEW_ROWS_UNROLLED for (int m = 0; m < M; ++m) {
      if constexpr (N == 4) {
        __m256 halves[N];
        FEW_ROWS_UNROLLED for (int n = 0; n < N; ++n) {
          halves[n] = _mm256_add_ps(_mm512_castps512_ps256(sums[m][n]),
                                    _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(sums[m][n]), 1)));
        }
        const __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(halves[0], halves[1]), _mm256_hadd_ps(halves[2], halves[3]));
        _mm_storeu_ps(out + m * columns, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
      } else {
        out[m * columns] = _mm512_reduce_add_ps(sums[m][0]);
      }
    }
  }
#else
  static bool serves(int64_t) { return false; }
  static void run(const float*, const float*, float*, int64_t, int64_t, int64_t) {}
#endif
};

}  // namespace daceml
