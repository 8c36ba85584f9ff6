// The windows of images as rows of a matrix, [images, rows, columns, channels, KH, KW], and their sums back in images.
#pragma once
#include "team.h"
#include <cstdint>
#include <cstring>

namespace columns {

// Sizes and strides in elements, in the order in which the launch passes them after the number of blocks.
struct Shape {
  int64_t images, channels, height, width, rows, columns;  // rows and columns are those of windows
  int64_t x_image, x_channel, x_row, x_column;
  int64_t stride_row, stride_column, padding_row, padding_column, dilation_row, dilation_column;

  // Where element (i, j) of window (row, column) lies from the image's beginning on, or -1 in the padding.
  int64_t place(int64_t row, int64_t column, int i, int j) const {
    int64_t h = row * stride_row - padding_row + i * dilation_row;
    int64_t w = column * stride_column - padding_column + j * dilation_column;
    return h >= 0 && h < height && w >= 0 && w < width ? h * x_row + w * x_column : -1;
  }
};

// pointers: image, windows (dense).
template <typename T, int KH, int KW>
void gather(void** pointers, const int64_t* integers) {
  constexpr int Q = KH * KW;
  static const T zero = 0;
  int64_t blocks = integers[0];
  Shape s;
  memcpy(&s, integers + 1, sizeof(Shape));
  int64_t all = s.images * s.rows;
#pragma omp parallel for num_threads(vm_team(blocks)) schedule(static) if (vm_team(blocks) > 1)
  for (int64_t block = 0; block < blocks; ++block)
    for (int64_t r = all * block / blocks; r < all * (block + 1) / blocks; ++r) {
      int64_t image = r / s.rows, row = r % s.rows;
      const T* x = (const T*)pointers[0] + image * s.x_image;
      T* y = (T*)pointers[1] + r * s.columns * s.channels * Q;
      for (int64_t column = 0; column < s.columns; ++column, y += s.channels * Q) {
        const T* from[Q];
        int64_t step[Q];
        bool inside = s.x_channel == 1;
        for (int q = 0; q < Q; ++q) {
          int64_t place = s.place(row, column, q / KW, q % KW);
          from[q] = place < 0 ? &zero : x + place;
          step[q] = place < 0 ? 0 : s.x_channel;
          inside = inside && place >= 0;
        }
        if (inside) {
          for (int64_t c = 0; c < s.channels; ++c)
#pragma GCC unroll 16
            for (int q = 0; q < Q; ++q) y[c * Q + q] = from[q][c];
        } else {
          for (int64_t c = 0; c < s.channels; ++c)
#pragma GCC unroll 16
            for (int q = 0; q < Q; ++q) y[c * Q + q] = from[q][c * step[q]];
        }
      }
    }
}

// pointers: windows (dense), image. A block adds up what belongs to some channels of an image, so none meets another.
template <typename T, int KH, int KW>
void scatter(void** pointers, const int64_t* integers) {
  constexpr int Q = KH * KW;
  constexpr int64_t GROUP = 64;
  int64_t blocks = integers[0];
  Shape s;
  memcpy(&s, integers + 1, sizeof(Shape));
  int64_t groups = (s.channels + GROUP - 1) / GROUP, all = s.images * groups;
#pragma omp parallel for num_threads(vm_team(blocks)) schedule(static) if (vm_team(blocks) > 1)
  for (int64_t block = 0; block < blocks; ++block)
    for (int64_t u = all * block / blocks; u < all * (block + 1) / blocks; ++u) {
      int64_t image = u / groups, first = u % groups * GROUP;
      int64_t count = s.channels - first < GROUP ? s.channels - first : GROUP;
      T* x = (T*)pointers[1] + image * s.x_image + first * s.x_channel;
      for (int64_t h = 0; h < s.height; ++h)
        for (int64_t w = 0; w < s.width; ++w)
          for (int64_t c = 0; c < count; ++c) x[h * s.x_row + w * s.x_column + c * s.x_channel] = 0;
      for (int64_t row = 0; row < s.rows; ++row)
        for (int64_t column = 0; column < s.columns; ++column) {
          int64_t window = (image * s.rows + row) * s.columns + column;
          const T* y = (const T*)pointers[0] + (window * s.channels + first) * Q;
          for (int q = 0; q < Q; ++q) {
            int64_t place = s.place(row, column, q / KW, q % KW);
            if (place < 0) continue;
            T* to = x + place;
            if (s.x_channel == 1)
              for (int64_t c = 0; c < count; ++c) to[c] += y[c * Q + q];
            else
              for (int64_t c = 0; c < count; ++c) to[c * s.x_channel] += y[c * Q + q];
          }
        }
    }
}

}  // namespace columns
