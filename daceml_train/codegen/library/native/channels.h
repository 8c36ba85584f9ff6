// Depthwise convolutions of images with their channels last: a vector of channels of several neighboring results at a
// time, so that a pixel is read once for all windows that it is in. What is elementwise on the result follows at once.
#pragma once
#include "matmul.h"

namespace product {

constexpr int64_t GROUP = 128;  // channels that a thread takes at a time, as in codegen/library/matmul_epilogue.py

template <int N> struct Lanes { typedef Vector type; };
template <> struct Lanes<1> { typedef float type; };

// COUNT results next to one another, whose windows are inside of the image but for rows above `first` and from `last` on.
template <int N, int KW, int S, int COUNT>
static inline void windows(const Shape& s, const float* x, const float* w, int64_t first, int64_t last,
                           typename Lanes<N>::type* sum) {
  typedef typename Lanes<N>::type V;
#pragma GCC unroll 8
  for (int o = 0; o < COUNT; ++o) sum[o] = V{};
  for (int64_t i = first; i < last; ++i) {
    const float* row = x + i * s.x_row;
    V weight[KW], pixel[(COUNT - 1) * S + KW];
#pragma GCC unroll 8
    for (int j = 0; j < KW; ++j) weight[j] = *(const V*)(w + (i * KW + j) * s.channels);
#pragma GCC unroll 32
    for (int j = 0; j < (COUNT - 1) * S + KW; ++j) pixel[j] = *(const V*)(row + j * s.x_column);
#pragma GCC unroll 8
    for (int o = 0; o < COUNT; ++o)
#pragma GCC unroll 8
      for (int j = 0; j < KW; ++j) sum[o] += pixel[o * S + j] * weight[j];
  }
}

// A row of results of N channels from `c` on; `x` is where the first window of the row begins.
template <int N, int KW, int S, typename Body>
static void row_of(const Shape& s, const Body& body, const float* x, const float* w, int64_t first, int64_t last,
                   int64_t at, int64_t c, float* y) {
  typedef typename Lanes<N>::type V;
  constexpr int COUNT = S == 1 ? 6 : 4;
  int64_t low = (s.padding_column + S - 1) / S, high = s.width - KW + s.padding_column;
  high = high < 0 ? 0 : high / S + 1;  // windows from `low` to `high` are inside
  if (high > s.columns) high = s.columns;
  for (int64_t column = 0; column < s.columns;) {
    V sum[COUNT];
    int count = 1;
    if (column >= low && column + COUNT <= high) {
      count = COUNT;
      windows<N, KW, S, COUNT>(s, x + column * S * s.x_column, w, first, last, sum);
    } else if (column >= low && column < high) {
      windows<N, KW, S, 1>(s, x + column * S * s.x_column, w, first, last, sum);
    } else {
      sum[0] = V{};
      for (int64_t i = first; i < last; ++i)
        for (int64_t j = 0; j < KW; ++j) {
          int64_t place = column * S + j, pixel = place - s.padding_column;
          if (pixel >= 0 && pixel < s.width)
            sum[0] += *(const V*)(x + i * s.x_row + place * s.x_column) * *(const V*)(w + (i * KW + j) * s.channels);
        }
    }
    for (int o = 0; o < count; ++o, ++column, at += s.outer) {
      const float* sums = (const float*)(sum + o);
#pragma omp simd
      for (int k = 0; k < N; ++k) y[at + k] = body(sums[k], at + k, c + k);
    }
  }
}

// As `run`; the matrix has a row for each element of the window, a column for each channel. KW columns of a window, which
// moves by S.
template <typename Body, int X, int MATRIX, int Y, int KW, int S>
void run_by_channels(void** pointers, const int64_t* integers) {
  int64_t blocks = integers[0];
  Shape s;
  memcpy(&s, integers + 1, sizeof(Shape));
  const Body body(pointers, integers + 2 + sizeof(Shape) / sizeof(int64_t));
  int64_t groups = (s.channels + GROUP - 1) / GROUP, all = s.images * s.rows * groups;
#pragma omp parallel for num_threads(vm_team(blocks)) schedule(static) if (vm_team(blocks) > 1)
  for (int64_t block = 0; block < blocks; ++block)
    for (int64_t u = all * block / blocks; u < all * (block + 1) / blocks; ++u) {
      int64_t image = u / groups / s.rows, row = u / groups % s.rows, begin = u % groups * GROUP;
      int64_t end = begin + GROUP < s.channels ? begin + GROUP : s.channels;
      int64_t top = row * s.stride_row - s.padding_row;
      int64_t first = top < 0 ? -top : 0, last = s.height - top < s.kernel_rows ? s.height - top : s.kernel_rows;
      const float* x = (const float*)pointers[X] + image * s.x_image + top * s.x_row - s.padding_column * s.x_column;
      const float* w = (const float*)pointers[MATRIX];
      int64_t at = (image * s.rows + row) * s.columns * s.outer, c = begin;
      for (; c + LANES <= end; c += LANES)
        row_of<LANES, KW, S>(s, body, x + c, w + c, first, last, at + c, c, (float*)pointers[Y]);
      for (; c < end; ++c) row_of<1, KW, S>(s, body, x + c, w + c, first, last, at + c, c, (float*)pointers[Y]);
    }
}

}  // namespace product
