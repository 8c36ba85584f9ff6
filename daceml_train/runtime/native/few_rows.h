// Matmuls of few rows, as cells of levels have them: MKL needs up to three times as long there.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#define FEW_ROWS_UNROLLED _Pragma("GCC unroll 8")  // sums stay in registers
#define FEW_ROWS_AVX2 __attribute__((target("avx2,fma")))
#endif

namespace daceml {

// out[rows, columns] = a[rows, inner] @ b, all of them row-major; b is [inner, columns] or, `transposed`, [columns, inner].
// A tile of a few rows and columns is computed at once: `b` is read from memory once, and is all that takes time for the
// fewest rows. With AVX-512 they are on one thread, and transposed. With AVX2 threads divide the columns, and the most rows
// for which this is faster than MKL were measured (AMD EPYC, Zen 3): half the time for three rows, equal times from there on.
struct FewRows {
#if defined(__x86_64__)
  static bool serves(int64_t rows, bool transposed) {
    if (wide()) return transposed && rows <= 16;
    static const bool known = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    return known && rows <= (threads() > 1 ? 20 : 8);
  }

  static void run(const float* a, const float* b, float* out, int64_t rows, int64_t columns, int64_t inner, bool transposed) {
    if (wide()) return by_sixteen(a, b, out, rows, columns, inner);
    const int64_t width = transposed ? 4 : 16, tiles = (columns + width - 1) / width;
    const int count = rows * columns * inner < (1 << 18) ? 1 : threads();
#pragma omp parallel for num_threads(count) schedule(static)
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t j = tile * width, left = std::min(width, columns - j);
      transposed ? dots(a, b + j * inner, out + j, rows, left, columns, inner) : sums(a, b + j, out + j, rows, left, columns, inner);
    }
  }

 private:
  static bool wide() {
    static const bool known = __builtin_cpu_supports("avx512f");
    return known;
  }

  static int threads() { return omp_in_parallel() != 0 ? 1 : omp_get_max_threads(); }

  // ---- AVX2: columns of the result next to each other -----------------------------------------------------------------
  // Columns that are rows of `b`, up to four.
  static void dots(const float* a, const float* b, float* out, int64_t rows, int64_t left, int64_t columns, int64_t inner) {
    for (int64_t i = 0; i < rows; i += 3) {
      const int64_t count = std::min<int64_t>(3, rows - i);
      const float* from = a + i * inner;
      float* to = out + i * columns;
      if (left < 4) {
        for (int64_t n = 0; n < left; ++n) {
          for (int64_t m = 0; m < count; ++m) dot<1, 1>(from + m * inner, b + n * inner, to + m * columns + n, columns, inner, false);
        }
      } else if (count == 3) {
        dot<3, 4>(from, b, to, columns, inner, i == 0);
      } else if (count == 2) {
        dot<2, 4>(from, b, to, columns, inner, i == 0);
      } else {
        dot<1, 4>(from, b, to, columns, inner, i == 0);
      }
    }
  }

  template <int M, int N>
  FEW_ROWS_AVX2 static void dot(const float* a, const float* b, float* out, int64_t columns, int64_t inner, bool ahead) {
    __m256 sums[M][N];
    FEW_ROWS_UNROLLED for (int m = 0; m < M; ++m) {
      FEW_ROWS_UNROLLED for (int n = 0; n < N; ++n) sums[m][n] = _mm256_setzero_ps();
    }
    int64_t k = 0;
    for (; k + 8 <= inner; k += 8) {
      __m256 right[N];
      FEW_ROWS_UNROLLED for (int n = 0; n < N; ++n) {
        right[n] = _mm256_loadu_ps(b + n * inner + k);
        if (ahead) _mm_prefetch(reinterpret_cast<const char*>(b + (n + N) * inner + k), _MM_HINT_T0);
      }
      FEW_ROWS_UNROLLED for (int m = 0; m < M; ++m) {
        const __m256 one = _mm256_loadu_ps(a + m * inner + k);
        FEW_ROWS_UNROLLED for (int n = 0; n < N; ++n) sums[m][n] = _mm256_fmadd_ps(one, right[n], sums[m][n]);
      }
    }
    FEW_ROWS_UNROLLED for (int m = 0; m < M; ++m) {
      FEW_ROWS_UNROLLED for (int n = 0; n < N; ++n) {
        __m128 half = _mm_add_ps(_mm256_castps256_ps128(sums[m][n]), _mm256_extractf128_ps(sums[m][n], 1));
        half = _mm_add_ps(half, _mm_movehl_ps(half, half));
        float total = _mm_cvtss_f32(_mm_add_ss(half, _mm_shuffle_ps(half, half, 1)));
        for (int64_t rest = k; rest < inner; ++rest) total += a[m * inner + rest] * b[n * inner + rest];
        out[m * columns + n] = total;
      }
    }
  }

  // Columns that are columns of `b`, up to sixteen; they are copied next to each other where many rows read them.
  static void sums(const float* a, const float* b, float* out, int64_t rows, int64_t left, int64_t columns, int64_t inner) {
    thread_local std::vector<float> panel;
    float last[6 * 16];
    int64_t pitch = columns;
    if (rows > 12 || left < 16) {
      if (panel.size() < static_cast<size_t>(inner) * 16) panel.resize(static_cast<size_t>(inner) * 16);
      float* to = panel.data();
      if (left == 16) {
        for (int64_t k = 0; k < inner; ++k) std::memcpy(to + k * 16, b + k * columns, 16 * sizeof(float));
      } else {
        std::fill_n(to, inner * 16, 0.0f);
        for (int64_t k = 0; k < inner; ++k) std::copy_n(b + k * columns, left, to + k * 16);
      }
      b = panel.data(), pitch = 16;
    }
    const int64_t blocks = (rows + 5) / 6;
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t first = rows * block / blocks, count = rows * (block + 1) / blocks - first;
      float* to = out + first * columns;
      if (left == 16) {
        sum_of(count, a + first * inner, b, to, columns, inner, pitch);
      } else {
        sum_of(count, a + first * inner, b, last, 16, inner, pitch);
        for (int64_t m = 0; m < count; ++m) std::copy_n(last + m * 16, left, to + m * columns);
      }
    }
  }

  static void sum_of(int64_t rows, const float* a, const float* b, float* out, int64_t columns, int64_t inner, int64_t pitch) {
    switch (rows) {
      case 1: return sum<1>(a, b, out, columns, inner, pitch);
      case 2: return sum<2>(a, b, out, columns, inner, pitch);
      case 3: return sum<3>(a, b, out, columns, inner, pitch);
      case 4: return sum<4>(a, b, out, columns, inner, pitch);
      case 5: return sum<5>(a, b, out, columns, inner, pitch);
      default: return sum<6>(a, b, out, columns, inner, pitch);
    }
  }

  template <int M>
  FEW_ROWS_AVX2 static void sum(const float* a, const float* b, float* out, int64_t columns, int64_t inner, int64_t pitch) {
    __m256 sums[M][2];
    FEW_ROWS_UNROLLED for (int m = 0; m < M; ++m) sums[m][0] = sums[m][1] = _mm256_setzero_ps();
    for (int64_t k = 0; k < inner; ++k) {
      const __m256 first = _mm256_loadu_ps(b + k * pitch), second = _mm256_loadu_ps(b + k * pitch + 8);
      FEW_ROWS_UNROLLED for (int m = 0; m < M; ++m) {
        const __m256 one = _mm256_broadcast_ss(a + m * inner + k);
        sums[m][0] = _mm256_fmadd_ps(one, first, sums[m][0]);
        sums[m][1] = _mm256_fmadd_ps(one, second, sums[m][1]);
      }
    }
    FEW_ROWS_UNROLLED for (int m = 0; m < M; ++m) {
      _mm256_storeu_ps(out + m * columns, sums[m][0]);
      _mm256_storeu_ps(out + m * columns + 8, sums[m][1]);
    }
  }

  // ---- AVX-512 --------------------------------------------------------------------------------------------------------
  static void by_sixteen(const float* a, const float* b, float* out, int64_t rows, int64_t columns, int64_t inner) {
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
  static bool serves(int64_t, bool) { return false; }
  static void run(const float*, const float*, float*, int64_t, int64_t, int64_t, bool) {}
#endif
};

}  // namespace daceml
