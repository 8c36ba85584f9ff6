// G g G^T of the filters of a 3x3 convolution, in the panels that native/winograd.h reads: F(2x2, 3x3). Filters are read
// along whatever is contiguous, and transposed in registers where that is not the panel's columns.
#pragma once
#include "matmul.h"

namespace product {

constexpr int AT_ONCE = 16, TAPS = 9;  // filters of one column that are transformed at a time; as in codegen/library/winograd.py

// Sizes, and strides in elements, in the order in which the launch passes them after the number of blocks. A filter is
// that of a column and a row of the 16 matrices; `turned` ones are read from the last tap to the first.
struct Filters {
  int64_t columns, rows, column, row, down, right, turned, elements;
};

// COUNT consecutive numbers for each of LANES columns, `step` elements apart, of which `there` exist: to[i] has the numbers i.
template <int COUNT>
static inline void columns_of(const float* from, int64_t step, int64_t there, const float* last, Vector* to, int64_t every) {
#pragma GCC unroll 4
  for (int begin = 0; begin < COUNT; begin += LANES) {
    Vector x[LANES];
#pragma GCC unroll 16
    for (int l = 0; l < LANES; ++l) {
      const float* at = from + l * step + begin;
      if (l < there && at + LANES <= last) {
        x[l] = *(const Vector*)at;
      } else {
        float some[LANES] = {};
        if (l < there) memcpy(some, at, 4 * (COUNT - begin < LANES ? COUNT - begin : LANES));
        memcpy(&x[l], some, sizeof(some));
      }
    }
    vm::transpose(x);
    const int made = COUNT - begin < LANES ? COUNT - begin : LANES;
#pragma GCC unroll 16
    for (int i = 0; i < made; ++i) to[(begin + i) * every] = x[i];
  }
}

// The filters of LANES columns and `count` rows: taps[row * TAPS + tap].
static inline void gather(const Filters& s, const float* from, int64_t there, int64_t count, const float* last, Vector* taps) {
  const bool dense = s.right == 1 && s.down == 3;
  if (there == LANES && s.column == 1) {
    for (int64_t r = 0; r < count; ++r)
      for (int t = 0; t < TAPS; ++t) taps[r * TAPS + t] = *(const Vector*)(from + r * s.row + t / 3 * s.down + t % 3 * s.right);
  } else if (dense && s.row == TAPS && count == AT_ONCE) {
    columns_of<TAPS * AT_ONCE>(from, s.column, there, last, taps, 1);
  } else if (dense) {
    for (int64_t r = 0; r < count; ++r) columns_of<TAPS>(from + r * s.row, s.column, there, last, taps + r * TAPS, 1);
  } else if (s.row == 1 && count == AT_ONCE) {
    for (int t = 0; t < TAPS; ++t)
      columns_of<AT_ONCE>(from + t / 3 * s.down + t % 3 * s.right, s.column, there, last, taps + t, TAPS);
  } else {
    for (int64_t r = 0; r < count; ++r)
      for (int t = 0; t < TAPS; ++t) {
        Vector x = {};
        for (int64_t l = 0; l < there; ++l) x[l] = from[l * s.column + r * s.row + t / 3 * s.down + t % 3 * s.right];
        taps[r * TAPS + t] = x;
      }
  }
}

// pointers: the weight, the panels.
static void transform_filters(void** pointers, const int64_t* integers) {
  const int64_t blocks = integers[0];
  Filters s;
  memcpy(&s, integers + 1, sizeof(Filters));
  const float* w = (const float*)pointers[0];
  float* y = (float*)pointers[1];
  const int64_t panels = (s.columns + PANEL - 1) / PANEL, groups = (s.rows + AT_ONCE - 1) / AT_ONCE;
#pragma omp parallel for num_threads(vm_team(blocks)) schedule(static) if (vm_team(blocks) > 1)
  for (int64_t block = 0; block < blocks; ++block) {
    for (int64_t unit = panels * groups * block / blocks; unit < panels * groups * (block + 1) / blocks; ++unit) {
      const int64_t panel = unit / groups, first = unit % groups * AT_ONCE;
      const int64_t count = s.rows - first < AT_ONCE ? s.rows - first : AT_ONCE;
      for (int64_t lane = 0; lane < PANEL; lane += LANES) {
        const int64_t column = panel * PANEL + lane, left = s.columns - column;
        const int64_t there = left < 0 ? 0 : left < LANES ? left : LANES;
        Vector taps[AT_ONCE * TAPS];
        gather(s, w + column * s.column + first * s.row, there, count, w + s.elements, taps);
        for (int64_t r = 0; r < count; ++r) {
          Vector g[3][3], a[4][3];
#pragma GCC unroll 9
          for (int t = 0; t < TAPS; ++t) g[t / 3][t % 3] = taps[r * TAPS + (s.turned ? TAPS - 1 - t : t)];
#pragma GCC unroll 3
          for (int j = 0; j < 3; ++j) {
            const Vector outer = (g[0][j] + g[2][j]) * 0.5f, inner = g[1][j] * 0.5f;
            a[0][j] = g[0][j], a[1][j] = outer + inner, a[2][j] = outer - inner, a[3][j] = g[2][j];
          }
          float* to = y + (panel * 16 * s.rows + first + r) * PANEL + lane;
#pragma GCC unroll 4
          for (int i = 0; i < 4; ++i) {
            const Vector outer = (a[i][0] + a[i][2]) * 0.5f, inner = a[i][1] * 0.5f;
            *(Vector*)(to + (4 * i) * s.rows * PANEL) = a[i][0];
            *(Vector*)(to + (4 * i + 1) * s.rows * PANEL) = outer + inner;
            *(Vector*)(to + (4 * i + 2) * s.rows * PANEL) = outer - inner;
            *(Vector*)(to + (4 * i + 3) * s.rows * PANEL) = a[i][2];
          }
        }
      }
    }
  }
}

}  // namespace product
