// The gradient of a 3x3 convolution for its weight in tiles of 2x2 results, the adjoint of F(2x2, 3x3) for the filter:
// G^T ((A g A^T) * (B^T d B)) G, where 16 matmuls over all tiles do the work.
#pragma once
#include "winograd.h"
#include "winograd_filter.h"

namespace product {

constexpr int64_t SIDE = 64;           // channels of images, and of results, that a unit of work has; as in codegen/library/winograd.py
constexpr int64_t CHUNK = 96;          // tiles that are transformed at a time
constexpr int64_t PITCH = SIDE + 16;   // elements from one transformed tile to the next

// Sizes and strides in elements, in the order in which the launch passes them after the number of blocks: of images x, of
// the results' gradient g, of the weight's gradient w. Tiles are shared out to `parts` sums, which are added up in order.
struct Gradient {
  int64_t images, channels, height, width, outer, rows, columns, padding_row, padding_column, parts;
  int64_t x_image, x_row, x_column, g_image, g_row, g_column, w_outer, w_channel, w_row, w_column;

  int64_t down() const { return (rows + 1) / 2; }
  int64_t right() const { return (columns + 1) / 2; }
  int64_t tiles() const { return images * down() * right(); }
};

// A g A^T of a tile of 2x2 results; `to` are 16 rows `step` elements apart.
static inline void spread(const float* const* results, int64_t columns, float* to, int64_t step) {
  for (int64_t c = 0; c < columns; c += LANES) {
    Vector r[4][2];
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      Vector first = *(const Vector*)(results[j] + c), second = *(const Vector*)(results[2 + j] + c);
      r[0][j] = first, r[1][j] = first + second, r[2][j] = first - second, r[3][j] = -second;
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      *(Vector*)(to + 4 * i * step + c) = r[i][0];
      *(Vector*)(to + (4 * i + 1) * step + c) = r[i][0] + r[i][1];
      *(Vector*)(to + (4 * i + 2) * step + c) = r[i][0] - r[i][1];
      *(Vector*)(to + (4 * i + 3) * step + c) = -r[i][1];
    }
  }
}

// R channels of images times N vectors of results, added up over tiles.
template <int R, int N>
static void accumulate(const float* x, const float* g, int64_t tiles, float* sums) {
  Vector sum[R][N];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) sum[r][v] = *(const Vector*)(sums + r * SIDE + v * LANES);
#pragma GCC unroll 2
  for (int64_t t = 0; t < tiles; ++t, x += PITCH, g += PITCH) {
    Vector w[N];
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) w[v] = *(const Vector*)(g + v * LANES);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < N; ++v) sum[r][v] += x[r] * w[v];
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) *(Vector*)(sums + r * SIDE + v * LANES) = sum[r][v];
}

template <int N>
static void accumulate(const float* x, const float* g, int64_t tiles, int64_t channels, float* sums) {
  for (int64_t c = 0; c < channels;) {
    const int64_t left = channels - c;
    const float* from = x + c;
    float* to = sums + c * SIDE;
    if (left >= USUAL)
      accumulate<USUAL, N>(from, g, tiles, to), c += USUAL;
    else if (USUAL > 8 && left >= 8)
      accumulate<USUAL < 8 ? USUAL : 8, N>(from, g, tiles, to), c += 8;
    else if (USUAL > 4 && left >= 4)
      accumulate<USUAL < 4 ? USUAL : 4, N>(from, g, tiles, to), c += 4;
    else
      accumulate<1, N>(from, g, tiles, to), ++c;
  }
}

// The sums [16][SIDE][SIDE] of some channels of images and results over the tiles from `first` to `last`.
class Sums {
 public:
  Sums(const Gradient& s, const float* x, const float* g, float* scratch)
      : s_(s), x_(x), g_(g), zero_(scratch), pixels_(scratch + SIDE), results_(pixels_ + 16 * CHUNK * PITCH) {
    memset(zero_, 0, SIDE * sizeof(float));
  }

  void over(int64_t first, int64_t last, int64_t channel, int64_t channels, int64_t column, int64_t columns, float* sums) {
    memset(sums, 0, 16 * SIDE * SIDE * sizeof(float));
    const int64_t turns = (last - first + CHUNK - 1) / CHUNK;
    for (int64_t turn = 0; turn < turns; ++turn) {
      const int64_t begin = first + (last - first) * turn / turns, end = first + (last - first) * (turn + 1) / turns;
      for (int64_t t = begin; t < end; ++t) prepare(t, t - begin, channel, channels, column, columns);
      for (int q = 0; q < 16; ++q)
        for (int64_t k = 0; k < columns; k += ACROSS * LANES) {
          const float *d = pixels_ + q * CHUNK * PITCH, *e = results_ + q * CHUNK * PITCH + k;
          float* to = sums + q * SIDE * SIDE + k;
          if (columns - k >= ACROSS * LANES)
            accumulate<ACROSS>(d, e, end - begin, channels, to);
          else
            accumulate<ACROSS / 2>(d, e, end - begin, channels, to);
        }
    }
  }

 private:
  void prepare(int64_t tile, int64_t place, int64_t channel, int64_t channels, int64_t column, int64_t columns) {
    const int64_t right = tile % s_.right() * 2, down = tile / s_.right() % s_.down() * 2, image = tile / s_.right() / s_.down();
    const float *pixels[16], *results[4];
    for (int64_t i = 0; i < 16; ++i) {
      const int64_t h = down - s_.padding_row + i / 4, w = right - s_.padding_column + i % 4;
      const bool inside = h >= 0 && h < s_.height && w >= 0 && w < s_.width;
      pixels[i] = inside ? x_ + image * s_.x_image + h * s_.x_row + w * s_.x_column + channel : zero_;
    }
    for (int64_t i = 0; i < 4; ++i) {
      const int64_t h = down + i / 2, w = right + i % 2;
      const bool inside = h < s_.rows && w < s_.columns;
      results[i] = inside ? g_ + image * s_.g_image + h * s_.g_row + w * s_.g_column + column : zero_;
    }
    transform(pixels, channels, pixels_ + place * PITCH, CHUNK * PITCH);
    spread(results, columns, results_ + place * PITCH, CHUNK * PITCH);
  }

  const Gradient& s_;
  const float *x_, *g_;
  float *zero_, *pixels_, *results_;
};

// G^T m G of the sums of all parts, `step` elements apart, stored in the weight's layout.
static void finish(const Gradient& s, const float* sums, int64_t step, int64_t channels, int64_t columns, float* w) {
  const bool dense = s.w_column == 1 && s.w_row == 3 && s.w_channel == TAPS;
  for (int64_t k = 0; k < columns; k += LANES)
    for (int64_t c = 0; c < channels; c += LANES) {
      Vector made[LANES * TAPS];
      for (int64_t r = 0; r < LANES; ++r) {
        Vector m[4][4], a[3][4];
#pragma GCC unroll 16
        for (int q = 0; q < 16; ++q) {
          const float* from = sums + q * SIDE * SIDE + (c + r) * SIDE + k;
          Vector sum = *(const Vector*)from;
          for (int64_t part = 1; part < s.parts; ++part) sum += *(const Vector*)(from + part * step);
          m[q / 4][q % 4] = sum;
        }
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
          const Vector both = (m[1][j] + m[2][j]) * 0.5f;
          a[0][j] = m[0][j] + both, a[1][j] = (m[1][j] - m[2][j]) * 0.5f, a[2][j] = both + m[3][j];
        }
#pragma GCC unroll 3
        for (int i = 0; i < 3; ++i) {
          const Vector both = (a[i][1] + a[i][2]) * 0.5f;
          Vector* to = made + r * TAPS + 3 * i;
          to[0] = a[i][0] + both, to[1] = (a[i][1] - a[i][2]) * 0.5f, to[2] = both + a[i][3];
        }
      }
      float* to = w + k * s.w_outer + c * s.w_channel;
      if (dense) {
        for (int b = 0; b < TAPS; ++b) {
          vm::transpose(made + b * LANES);
          for (int l = 0; l < LANES; ++l) *(Vector*)(to + l * s.w_outer + b * LANES) = made[b * LANES + l];
        }
      } else {
        for (int r = 0; r < LANES; ++r)
          for (int t = 0; t < TAPS; ++t)
            for (int l = 0; l < LANES; ++l)
              to[l * s.w_outer + r * s.w_channel + t / 3 * s.w_row + t % 3 * s.w_column] = made[r * TAPS + t][l];
      }
    }
}

// pointers: the results' gradient, images, the weight's gradient, scratch of the blocks, and the sums of all parts if there
// are several.
static void weight_gradient(void** pointers, const int64_t* integers) {
  const int64_t blocks = integers[0], bytes = integers[1];
  Gradient s;
  memcpy(&s, integers + 2, sizeof(Gradient));
  const float *g = (const float*)pointers[0], *x = (const float*)pointers[1];
  float *w = (float*)pointers[2], *parts = s.parts > 1 ? (float*)pointers[4] : nullptr;
  char* scratch = (char*)pointers[3];
  const int64_t across = (s.outer + SIDE - 1) / SIDE, squares = (s.channels + SIDE - 1) / SIDE * across;
  const int64_t square = 16 * SIDE * SIDE, tiles = s.tiles();
  auto store = [&](int64_t unit, const float* sums) {
    const int64_t channel = unit / across * SIDE, column = unit % across * SIDE;
    const int64_t channels = s.channels - channel < SIDE ? s.channels - channel : SIDE;
    const int64_t columns = s.outer - column < SIDE ? s.outer - column : SIDE;
    finish(s, sums, squares * square, channels, columns, w + column * s.w_outer + channel * s.w_channel);
  };
#pragma omp parallel for num_threads(vm_team(blocks)) schedule(static) if (vm_team(blocks) > 1)
  for (int64_t block = 0; block < blocks; ++block) {
    float* own = (float*)(scratch + block * bytes);
    Sums over(s, x, g, own + square);
    const int64_t units = squares * s.parts;
    for (int64_t unit = units * block / blocks; unit < units * (block + 1) / blocks; ++unit) {
      const int64_t part = unit / squares, place = unit % squares;
      const int64_t channel = place / across * SIDE, column = place % across * SIDE;
      float* sums = s.parts == 1 ? own : parts + unit * square;
      over.over(tiles * part / s.parts, tiles * (part + 1) / s.parts, channel, s.channels - channel < SIDE ? s.channels - channel : SIDE,
                column, s.outer - column < SIDE ? s.outer - column : SIDE, sums);
      if (s.parts == 1) store(place, sums);
    }
  }
  if (s.parts == 1) return;
#pragma omp parallel for num_threads(vm_team(blocks)) schedule(static) if (vm_team(blocks) > 1)
  for (int64_t unit = 0; unit < squares; ++unit) store(unit, parts + unit * square);
}

}  // namespace product
