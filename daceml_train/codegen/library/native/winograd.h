// Convolutions with windows of 3x3 and stride 1 in tiles of 2x2 results: F(2x2, 3x3) of Lavin and Gray, "Fast Algorithms
// for Convolutional Neural Networks", 2016. 16 products of tiles with a matrix replace 36 multiplications by 16.
#pragma once
#include "matmul.h"

namespace product {

constexpr int64_t TRANSFORMED = 5 << 18;  // bytes of transformed images at a time, as in codegen/library/matmul_epilogue.py
constexpr int64_t TILES = 96;             // most tiles at a time
constexpr int64_t WHOLE = 12;             // tiles at a time are a multiple of it, whatever the width of vectors is
static_assert(WHOLE % USUAL == 0 && TILES % WHOLE == 0, "tiles at a time are whole tiles of rows");

// B^T d B of a tile of 4x4 pixels; `to` are 16 rows `step` elements apart.
static inline void transform(const float* const* pixels, int64_t channels, float* to, int64_t step) {
  for (int64_t c = 0; c < channels; c += LANES) {
    Vector d[4][4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      Vector x[4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) x[j] = *(const Vector*)(pixels[4 * i + j] + c);
      d[i][0] = x[0] - x[2];
      d[i][1] = x[1] + x[2];
      d[i][2] = x[2] - x[1];
      d[i][3] = x[1] - x[3];
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      *(Vector*)(to + j * step + c) = d[0][j] - d[2][j];
      *(Vector*)(to + (4 + j) * step + c) = d[1][j] + d[2][j];
      *(Vector*)(to + (8 + j) * step + c) = d[2][j] - d[1][j];
      *(Vector*)(to + (12 + j) * step + c) = d[1][j] - d[3][j];
    }
  }
}

// A^T m A of the 16 sums of a tile: its 2x2 results, PANEL columns each; `sums` are 16 rows `step` elements apart.
static inline void results(const float* sums, int64_t step, float (*to)[PANEL]) {
#pragma GCC unroll 8
  for (int c = 0; c < PANEL; c += LANES) {
    Vector m[2][4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      Vector a = *(const Vector*)(sums + j * step + c), b = *(const Vector*)(sums + (4 + j) * step + c);
      Vector d = *(const Vector*)(sums + (8 + j) * step + c), e = *(const Vector*)(sums + (12 + j) * step + c);
      m[0][j] = a + b + d;
      m[1][j] = b - d - e;
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      *(Vector*)(to[2 * i] + c) = m[i][0] + m[i][1] + m[i][2];
      *(Vector*)(to[2 * i + 1] + c) = m[i][1] - m[i][2] - m[i][3];
    }
  }
}

// The tiles of images: each is two rows and two columns of results.
class Tiles {
 public:
  Tiles(const Shape& shape, const float* x, char* scratch)
      : s_(shape), x_(x), down_((shape.rows + 1) / 2), right_((shape.columns + 1) / 2), pitch_(shape.channels + 16) {
    zero_ = (float*)scratch;
    memset(zero_, 0, pitch_ * sizeof(float));
    images_ = zero_ + pitch_;
    int64_t most = TRANSFORMED / (16 * pitch_ * (int64_t)sizeof(float)) / WHOLE * WHOLE;
    most_ = most < WHOLE ? WHOLE : most < TILES ? most : TILES;
    sums_ = images_ + 16 * most_ * pitch_;
  }

  int64_t count() const { return s_.images * down_ * right_; }
  int64_t most() const { return most_; }

  void prepare(int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      int64_t column, row, image;
      place(t, image, row, column);
      const float* pixels[16];
      for (int64_t i = 0; i < 4; ++i)
        for (int64_t j = 0; j < 4; ++j) {
          int64_t h = row - s_.padding_row + i, w = column - s_.padding_column + j;
          bool inside = h >= 0 && h < s_.height && w >= 0 && w < s_.width;
          pixels[4 * i + j] = inside ? x_ + image * s_.x_image + h * s_.x_row + w * s_.x_column : zero_;
        }
      transform(pixels, s_.channels, images_ + (t - first) * pitch_, most_ * pitch_);
    }
  }

  // The products of `tiles` prepared tiles with a panel.
  void times(int64_t tiles, const float* panel) {
    for (int64_t q = 0; q < 16; ++q, panel += s_.channels * PANEL)
      for (int64_t t = 0; t < tiles; t += USUAL) {
        const float* rows[ROWS];
        for (int64_t r = 0; r < USUAL; ++r) rows[r] = images_ + (q * most_ + (t + r < tiles ? t + r : t)) * pitch_;
        int64_t bytes = s_.channels * PANEL * sizeof(float);
        Ahead ahead = {(const char*)panel + bytes + bytes * t / tiles, (int64_t)(PANEL * sizeof(float)) * USUAL / tiles};
        if (ahead.step > (int64_t)(PANEL * sizeof(float))) ahead.step = PANEL * sizeof(float);
        multiply<PANEL / LANES>(tiles - t < USUAL ? tiles - t : USUAL, rows, 1, s_.channels, panel, ahead, sums_ + (q * most_ + t) * PANEL);
      }
  }

  template <typename Body>
  void store(const Body& body, int64_t first, int64_t last, int64_t p, float* y) const {
    int64_t first_column = p * PANEL, columns = s_.outer - first_column < PANEL ? s_.outer - first_column : PANEL;
    for (int64_t t = first; t < last; ++t) {
      int64_t column, row, image;
      place(t, image, row, column);
      alignas(64) float made[4][PANEL];
      results(sums_ + (t - first) * PANEL, most_ * PANEL, made);
      for (int i = 0; i < 4; ++i) {
        int64_t h = row + i / 2, w = column + i % 2;
        if (h >= s_.rows || w >= s_.columns) continue;
        int64_t at = ((image * s_.rows + h) * s_.columns + w) * s_.outer + first_column;
        apply(body, made[i], at, first_column, columns, y);
      }
    }
  }

 private:
  void place(int64_t tile, int64_t& image, int64_t& row, int64_t& column) const {
    column = tile % right_ * 2, row = tile / right_ % down_ * 2, image = tile / right_ / down_;
  }

  const Shape& s_;
  const float* x_;
  int64_t down_, right_, pitch_, most_;
  float *zero_, *images_, *sums_;
};

// As `run`; the panels are those of the 16 transformed weights, one after the other.
template <typename Body, int X, int MATRIX, int Y>
void run_in_tiles(void** pointers, const int64_t* integers) {
  int64_t blocks = integers[0];
  Shape s;
  memcpy(&s, integers + 1, sizeof(Shape));
  integers += 1 + sizeof(Shape) / sizeof(int64_t);
  const int64_t bytes = integers[0];
  const Body body(pointers, integers + 1);
  const float* matrix = (const float*)pointers[MATRIX];
  float* y = (float*)pointers[Y];
  char* scratch = (char*)pointers[Y + 1];
  int64_t panels = (s.outer + PANEL - 1) / PANEL, all = s.images * ((s.rows + 1) / 2) * ((s.columns + 1) / 2);
  int64_t across = groups(blocks, (all + USUAL - 1) / USUAL, panels), down = blocks / across;
#pragma omp parallel for num_threads(vm_team(blocks)) schedule(static) if (vm_team(blocks) > 1)
  for (int64_t block = 0; block < blocks; ++block) {
    int64_t i = block / across, j = block % across;
    int64_t first = all * i / down, last = all * (i + 1) / down;
    Tiles tiles(s, (const float*)pointers[X], scratch + block * bytes);
    int64_t turns = (last - first + tiles.most() - 1) / tiles.most();
    for (int64_t turn = 0; turn < turns; ++turn) {
      int64_t begin = first + (last - first) * turn / turns, end = first + (last - first) * (turn + 1) / turns;
      tiles.prepare(begin, end);
      for (int64_t p = panels * j / across; p < panels * (j + 1) / across; ++p) {
        tiles.times(end - begin, matrix + p * 16 * s.channels * PANEL);
        tiles.store(body, begin, end, p, y);
      }
    }
  }
}

}  // namespace product
