// The weight gradient of a depthwise convolution whose arrays have their channels last: every kernel element of a
// block of channels is an accumulator in a register while a row of the image passes by, or those of one row of the kernel
// are if there are too few registers for all. Rows are summed in double.
#pragma once
#include "team.h"
#include "vectors.h"
#include <cstdint>
#include <cstring>

namespace depthwise {

template <typename T, int L> struct Lanes { typedef T type __attribute__((vector_size(L * sizeof(T)), aligned(sizeof(T)))); };
template <typename T> struct Lanes<T, 1> { typedef T type; };

// Sizes and strides in elements, in the order in which the launch passes them after the number of blocks.
struct Shape {
  int64_t images, channels, height, width, rows, columns;       // rows and columns are the result's
  int64_t x_image, x_row, x_column, g_image, g_row, g_column;
  int64_t stride_row, stride_column, padding_row, padding_column, dilation_row, dilation_column;
};

// Adds what one row of the cotangent contributes for L channels; `x` is the image, `from` its first row under the window.
template <typename T, int L, int KH, int KW, int FIRST, int COUNT>
inline void add_rows(const Shape& s, const T* g, const T* x, int64_t from, double* sum) {
  typedef typename Lanes<T, L>::type V;
  V a[COUNT * KW];
  for (int q = 0; q < COUNT * KW; ++q) a[q] = V{};
  int64_t reach = (KW - 1) * s.dilation_column;
  int64_t low = (s.padding_column + s.stride_column - 1) / s.stride_column;
  int64_t high = s.width - 1 - reach + s.padding_column;
  high = high < 0 ? 0 : high / s.stride_column + 1;
  if (high > s.columns) high = s.columns;
  if (low > high) low = high;
  auto edge = [&](int64_t begin, int64_t end) {
    for (int64_t w = begin; w < end; ++w) {
      V v = *(const V*)(g + w * s.g_column);
      for (int i = 0; i < COUNT; ++i)
        for (int j = 0; j < KW; ++j) {
          int64_t column = w * s.stride_column - s.padding_column + j * s.dilation_column;
          if (column >= 0 && column < s.width)
            a[i * KW + j] += v * *(const V*)(x + (from + i * s.dilation_row) * s.x_row + column * s.x_column);
        }
    }
  };
  edge(0, low);
  for (int64_t w = low; w < high; ++w) {
    V v = *(const V*)(g + w * s.g_column);
    const T* p = x + from * s.x_row + (w * s.stride_column - s.padding_column) * s.x_column;
#pragma GCC unroll 32
    for (int i = 0; i < COUNT; ++i)
#pragma GCC unroll 32
      for (int j = 0; j < KW; ++j)
        a[i * KW + j] += v * *(const V*)(p + i * s.dilation_row * s.x_row + j * s.dilation_column * s.x_column);
  }
  edge(high, s.columns);
  for (int q = 0; q < COUNT * KW; ++q) {
    const T* part = (const T*)&a[q];
    for (int l = 0; l < L; ++l) sum[(FIRST * KW + q) * s.channels + l] += part[l];
  }
}

template <typename T, int L, int KH, int KW>
inline void add_row(const Shape& s, const T* g, const T* x, int64_t top, double* sum) {
  if constexpr (KH * KW <= (vm::REGISTERS == 32 ? 25 : 9)) {
    if (top >= 0 && top + (KH - 1) * s.dilation_row < s.height) {
      add_rows<T, L, KH, KW, 0, KH>(s, g, x, top, sum);
      return;
    }
  }
  for (int i = 0; i < KH; ++i) {
    int64_t row = top + i * s.dilation_row;
    if (row >= 0 && row < s.height) add_rows<T, L, KH, KW, 0, 1>(s, g, x, row, sum + i * KW * s.channels);
  }
}

// pointers: cotangent, input, result [channels, 1, KH, KW], scratch of `blocks` times KH * KW * channels doubles.
template <typename T, int KH, int KW>
void weight_gradient(void** pointers, const int64_t* integers) {
  constexpr int L = vm::Lanes<T>::count;
  const T *g = (const T*)pointers[0], *x = (const T*)pointers[1];
  T* result = (T*)pointers[2];
  double* scratch = (double*)pointers[3];
  int64_t blocks = integers[0];
  Shape s;
  memcpy(&s, integers + 1, sizeof(Shape));
  int64_t all = s.images * s.rows, elements = KH * KW * s.channels;
#pragma omp parallel for num_threads(vm_team(blocks)) schedule(static) if (vm_team(blocks) > 1)
  for (int64_t block = 0; block < blocks; ++block) {
    double* sum = scratch + block * elements;
    memset(sum, 0, elements * sizeof(double));
    for (int64_t r = all * block / blocks; r < all * (block + 1) / blocks; ++r) {
      int64_t image = r / s.rows, row = r % s.rows, c = 0;
      const T *from = x + image * s.x_image, *of = g + image * s.g_image + row * s.g_row;
      int64_t top = row * s.stride_row - s.padding_row;
      for (; c + L <= s.channels; c += L) add_row<T, L, KH, KW>(s, of + c, from + c, top, sum + c);
      if constexpr (L > 4)
        for (; c + 4 <= s.channels; c += 4) add_row<T, 4, KH, KW>(s, of + c, from + c, top, sum + c);
      for (; c < s.channels; ++c) add_row<T, 1, KH, KW>(s, of + c, from + c, top, sum + c);
    }
  }
  for (int64_t c = 0; c < s.channels; ++c)
    for (int64_t q = 0; q < KH * KW; ++q) {
      double total = 0;
      for (int64_t block = 0; block < blocks; ++block) total += scratch[block * elements + q * s.channels + c];
      result[c * KH * KW + q] = (T)total;
    }
}

}  // namespace depthwise
