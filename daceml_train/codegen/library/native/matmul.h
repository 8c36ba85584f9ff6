// Rows times a matrix that lies in panels of 32 columns: products, and convolutions of images with their channels last,
// whose rows are windows. What is elementwise on the result happens while some rows of a panel are in cache.
#pragma once
#include <cstdint>
#include <cstring>
#include "kernel.h"
#include "vectors.h"

namespace product {

typedef vm::Lanes<float>::type Vector;
constexpr int LANES = vm::Lanes<float>::count, ACROSS = 2;
constexpr int ROWS = vm::REGISTERS == 32 ? 14 : 6, USUAL = vm::REGISTERS == 32 ? 12 : 6;
// Tiles of ACROSS vectors: USUAL rows are as many sums as leave registers to spare, ROWS as many as there are registers for.
constexpr int PANEL = 32;             // as in ops/packed.py
constexpr int64_t BLOCK = 64;         // tiles of rows whose addresses are at hand, as in codegen/library/matmul_epilogue.py
constexpr int64_t CACHED = 1 << 20;   // bytes of rows that a panel meets before the next one comes

// Sizes and strides in elements, in the order in which the launch passes them after the number of blocks. A matmul of
// matrices is a convolution of images of one pixel.
struct Shape {
  int64_t images, channels, height, width, rows, columns, outer;  // rows and columns are the result's, outer its channels
  int64_t kernel_rows, kernel_columns;
  int64_t x_image, x_channel, x_row, x_column;
  int64_t stride_row, stride_column, padding_row, padding_column, dilation_row, dilation_column;

  int64_t taps() const { return kernel_rows * kernel_columns; }
  int64_t depth() const { return taps() * channels; }
  int64_t windows() const { return images * rows * columns; }
  // Rows of a tile: more than usual where that saves one of few tiles, each of which reads the whole matrix.
  int64_t high() const {
    int64_t all = windows();
    return all <= 4 * ROWS && (all + ROWS - 1) / ROWS < (all + USUAL - 1) / USUAL ? ROWS : USUAL;
  }
  // Few channels, but those of neighboring pixels side by side: a row of the window is one tap.
  bool joined() const {
    return channels < LANES && x_channel == 1 && x_column == channels && dilation_column == 1 && kernel_columns > 1;
  }
  // Rows of less than a vector, or strided ones, are copied.
  bool gathered() const {
    if (joined()) return false;
    return channels < LANES || x_channel != 1;
  }
  // Elements from one gathered row to the next.
  int64_t pitch() const {
    int64_t whole = (depth() + 31) / 16 * 16;
    return whole % 1024 == 0 ? whole + 16 : whole;
  }
};

// What is needed soon and asked for on the way: `step` bytes for each element of a row.
struct Ahead {
  const char* first;
  int64_t step;
};

// M rows times N vectors of a panel; rows[q] are ROWS addresses for each of the taps.
template <int M, int N>
static void multiply(const float* const* rows, int64_t taps, int64_t channels, const float* panel, Ahead ahead,
                     float* tile) {
  Vector sum[M][N];
#pragma GCC unroll 16
  for (int r = 0; r < M; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) sum[r][v] = Vector{};
  for (int64_t q = 0; q < taps; ++q, rows += ROWS) {
    const float* x[M];
#pragma GCC unroll 16
    for (int r = 0; r < M; ++r) x[r] = rows[r];
#pragma GCC unroll 2
    for (int64_t k = 0; k < channels; ++k, panel += PANEL, ahead.first += ahead.step) {
      __builtin_prefetch(ahead.first, 0, 1);
      if (M <= 4) __builtin_prefetch(ahead.first + 64, 0, 1);
      Vector w[N];
#pragma GCC unroll 8
      for (int v = 0; v < N; ++v) w[v] = *(const Vector*)(panel + LANES * v);
#pragma GCC unroll 16
      for (int r = 0; r < M; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < N; ++v) sum[r][v] += x[r][k] * w[v];
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < M; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) *(Vector*)(tile + r * PANEL + LANES * v) = sum[r][v];
}

// One tile of at most ACROSS vectors.
template <int N>
static void narrow(int64_t count, const float* const* rows, int64_t taps, int64_t channels, const float* panel,
                   Ahead ahead, float* tile) {
  if (count > 12) return multiply<ROWS, N>(rows, taps, channels, panel, ahead, tile);
  if (count > 8) return multiply<ROWS < 12 ? ROWS : 12, N>(rows, taps, channels, panel, ahead, tile);
  if (count > 4) return multiply<ROWS < 8 ? ROWS : 8, N>(rows, taps, channels, panel, ahead, tile);
  if (count > 1) return multiply<ROWS < 4 ? ROWS : 4, N>(rows, taps, channels, panel, ahead, tile);
  multiply<1, N>(rows, taps, channels, panel, ahead, tile);
}

template <int N>
static void multiply(int64_t count, const float* const* rows, int64_t taps, int64_t channels, const float* panel,
                     Ahead ahead, float* tile) {
  if constexpr (N > ACROSS) {
    multiply<ACROSS>(count, rows, taps, channels, panel, ahead, tile);
    multiply<N - ACROSS>(count, rows, taps, channels, panel + ACROSS * LANES, {(const char*)panel, 0}, tile + ACROSS * LANES);
  } else {
    narrow<N>(count, rows, taps, channels, panel, ahead, tile);
  }
}

// The windows of a block of tiles: the addresses of their taps, or of copies of them.
class Rows {
 public:
  Rows(const Shape& shape, const float* x, char* scratch)
      : s_(shape), x_(x), gathered_(shape.gathered()), joined_(shape.joined()), high_(shape.high()) {
    int64_t unit = gathered_ || joined_ ? 1 : s_.channels;  // elements whose places follow from one offset
    taps_ = joined_ ? s_.kernel_rows : gathered_ ? 1 : s_.taps();
    channels_ = s_.depth() / taps_;
    places_ = channels_ / unit;
    offsets_ = (int64_t*)scratch;
    at_ = (const float**)(offsets_ + s_.depth() / unit);
    copies_ = (float*)(at_ + BLOCK * ROWS * taps_);
    int64_t* offset = offsets_;
    for (int64_t i = 0; i < s_.kernel_rows; ++i)
      for (int64_t j = 0; j < s_.kernel_columns; ++j)
        for (int64_t c = 0; c < s_.channels; c += unit)
          *offset++ = i * s_.dilation_row * s_.x_row + j * s_.dilation_column * s_.x_column + c * s_.x_channel;
    if (unit > 1) memset(copies_, 0, s_.channels * sizeof(float));  // what lies in the padding
  }

  // Tiles that the cache holds: at least one.
  int64_t most() const {
    int64_t row = gathered_ || joined_ ? s_.pitch() : s_.channels * s_.stride_row * s_.stride_column;
    int64_t tiles = CACHED / (high_ * row * (int64_t)sizeof(float));
    return tiles < 1 ? 1 : tiles < BLOCK ? tiles : BLOCK;
  }

  void prepare(int64_t first, int64_t last) {
    int64_t column = first % s_.columns, row = first / s_.columns % s_.rows, image = first / s_.columns / s_.rows;
    int64_t down = (s_.kernel_rows - 1) * s_.dilation_row, right = (s_.kernel_columns - 1) * s_.dilation_column;
    for (int64_t place = 0; place < last - first; ++place) {
      int64_t h = row * s_.stride_row - s_.padding_row, w = column * s_.stride_column - s_.padding_column;
      const float* x = x_ + image * s_.x_image + h * s_.x_row + w * s_.x_column;
      bool whole = inside(h, w) && inside(h + down, w + right);
      const float** at = at_ + place / high_ * taps_ * ROWS + place % high_;
      if (gathered_ || (joined_ && !whole)) {
        float* copy = copies_ + place * s_.pitch();
        gather(x, h, w, whole, copy);
        for (int64_t q = 0; q < taps_; ++q) at[q * ROWS] = copy + q * channels_;
      } else {
        for (int64_t q = 0; q < taps_; ++q)
          at[q * ROWS] = whole || there(q, h, w) ? x + offsets_[q * places_] : copies_;
      }
      if (++column == s_.columns) {
        column = 0;
        if (++row == s_.rows) row = 0, ++image;
      }
    }
    // A tile that is not full repeats its first row.
    int64_t count = last - first;
    for (int64_t r = count % high_; r && r < ROWS; ++r)
      for (int64_t q = 0; q < taps_; ++q) {
        const float** tile = at_ + (count / high_ * taps_ + q) * ROWS;
        tile[r] = tile[0];
      }
  }

  // A tile of up to ROWS rows of the block times a panel of which `columns` are wanted.
  void times(int64_t tile, int64_t count, const float* panel, int64_t columns, Ahead ahead, float* result) const {
    const float* const* rows = at_ + tile * taps_ * ROWS;
    if (columns > PANEL / 2)
      multiply<PANEL / LANES>(count, rows, taps_, channels_, panel, ahead, result);
    else
      multiply<PANEL / LANES / 2>(count, rows, taps_, channels_, panel, ahead, result);
  }

  // One of `shares` parts of what the next tile reads that this one does not; `last` is the block's last tile.
  Ahead rows_after(int64_t tile, int64_t last, int64_t share, int64_t shares) const {
    if (gathered_ || tile >= last) return {(const char*)at_, 0};
    int64_t bytes = high_ * s_.stride_column * s_.channels * sizeof(float);
    const char* first = (const char*)at_[(tile + 2) * taps_ * ROWS - ROWS];
    return {first + bytes * share / shares, (bytes + s_.depth() * shares - 1) / (s_.depth() * shares)};
  }

  // One of `shares` parts of the panel after this one.
  Ahead panel_after(const float* panel, int64_t share, int64_t shares) const {
    int64_t bytes = s_.depth() * PANEL * sizeof(float);
    return {(const char*)panel + bytes + bytes * share / shares, (int64_t)(PANEL * sizeof(float)) / shares};
  }

 private:
  bool inside(int64_t h, int64_t w) const { return h >= 0 && h < s_.height && w >= 0 && w < s_.width; }

  bool there(int64_t q, int64_t h, int64_t w) const {
    return inside(h + q / s_.kernel_columns * s_.dilation_row, w + q % s_.kernel_columns * s_.dilation_column);
  }

  void gather(const float* x, int64_t h, int64_t w, bool whole, float* copy) const {
    if (whole && s_.x_channel == 1 && s_.channels >= LANES) {
      for (int64_t q = 0; q < s_.taps(); ++q)
        memcpy(copy + q * s_.channels, x + offsets_[q * s_.channels], s_.channels * sizeof(float));
    } else if (whole) {
      for (int64_t k = 0; k < s_.depth(); ++k) copy[k] = x[offsets_[k]];
    } else {
      for (int64_t q = 0; q < s_.taps(); ++q) {
        bool read = there(q, h, w);
        for (int64_t k = q * s_.channels; k < (q + 1) * s_.channels; ++k) copy[k] = read ? x[offsets_[k]] : 0;
      }
    }
  }

  const Shape& s_;
  const float* x_;
  bool gathered_, joined_;
  int64_t high_, taps_, channels_, places_;  // of what is multiplied: a copy is one tap of all channels; offsets for each tap
  int64_t* offsets_;
  const float** at_;
  float* copies_;
};

// In how many groups of columns `blocks` threads share the result; each group's rows are shared by the other threads.
static int64_t groups(int64_t blocks, int64_t tiles, int64_t panels) {
  int64_t best = 1, least = INT64_MAX;
  for (int64_t g = 1; g <= blocks; ++g) {
    if (blocks % g) continue;
    int64_t rows = (tiles + blocks / g - 1) / (blocks / g) * USUAL, columns = (panels + g - 1) / g * PANEL;
    int64_t cost = rows * columns + 8 * (rows + columns);  // a product, and what is fetched from further away
    if (cost < least) best = g, least = cost;
  }
  return best;
}

// What becomes of the sums of a row of the result, from element `at` and column `column` on.
template <typename Body>
static inline void apply(const Body& body, const float* sums, int64_t at, int64_t column, int64_t columns, float* y) {
  if (columns == PANEL) {
#pragma omp simd
    for (int64_t c = 0; c < PANEL; ++c) y[at + c] = body(sums[c], at + c, column + c);
  } else {
#pragma omp simd
    for (int64_t c = 0; c < columns; ++c) y[at + c] = body(sums[c], at + c, column + c);
  }
}

// The result's elements in row tile t and panel p; the tile is the one numbered `place` in its block.
template <typename Body>
static void tile(const Rows& rows, const Body& body, const Shape& s, int64_t t, int64_t place, int64_t p,
                 const float* panel, Ahead ahead, float* y) {
  alignas(64) float sums[ROWS * PANEL];
  int64_t column = p * PANEL, columns = s.outer - column < PANEL ? s.outer - column : PANEL;
  int64_t high = s.high(), count = s.windows() - t * high < high ? s.windows() - t * high : high;
  for (int64_t r = 0; r < count; ++r) {
    int64_t at = (t * high + r) * s.outer + column;
    body.ahead(at);
    for (int64_t c = 0; c < columns; c += 16) __builtin_prefetch(y + at + c, 1);
  }
  rows.times(place, count, panel, columns, ahead, sums);
  for (int64_t r = 0; r < count; ++r) {
    int64_t at = (t * high + r) * s.outer + column;
    apply(body, sums + r * PANEL, at, column, columns, y);
  }
}

// pointers: operands, two of which are x and the matrix, the result, scratch. `Body` makes an element of the result from a
// sum, its place in the result, and its column.
template <typename Body, int X, int MATRIX, int Y>
void run(void** pointers, const int64_t* integers) {
  int64_t blocks = integers[0];
  Shape s;
  memcpy(&s, integers + 1, sizeof(Shape));
  integers += 1 + sizeof(Shape) / sizeof(int64_t);
  const int64_t bytes = integers[0];  // of scratch, for each block
  const Body body(pointers, integers + 1);
  const float* matrix = (const float*)pointers[MATRIX];
  float* y = (float*)pointers[Y];
  char* scratch = (char*)pointers[Y + 1];
  int64_t windows = s.windows(), high = s.high(), tiles = (windows + high - 1) / high, panels = (s.outer + PANEL - 1) / PANEL;
  int64_t across = groups(blocks, tiles, panels), down = blocks / across;
#pragma omp parallel for num_threads(vm_team(blocks)) schedule(static) if (vm_team(blocks) > 1)
  for (int64_t block = 0; block < blocks; ++block) {
    int64_t i = block / across, j = block % across;
    int64_t first = tiles * i / down, last = tiles * (i + 1) / down;
    Rows rows(s, (const float*)pointers[X], scratch + block * bytes);
    int64_t most = rows.most();
    for (int64_t begin = first; begin < last; begin += most) {
      int64_t end = begin + most < last ? begin + most : last;
      rows.prepare(begin * high, end * high < windows ? end * high : windows);
      int64_t left = panels * j / across, right = panels * (j + 1) / across;
      int64_t panel = PANEL * s.depth();
      if ((right - left) * panel * (int64_t)sizeof(float) <= CACHED) {  // panels stay, rows come and go
        for (int64_t t = begin; t < end; ++t)
          for (int64_t p = left; p < right; ++p) {
            Ahead ahead = rows.rows_after(t - begin, end - begin - 1, p - left, right - left);
            tile(rows, body, s, t, t - begin, p, matrix + p * panel, ahead, y);
          }
      } else {
        for (int64_t p = left; p < right; ++p)
          for (int64_t t = begin; t < end; ++t) {
            Ahead ahead = rows.panel_after(matrix + p * panel, t - begin, end - begin);
            tile(rows, body, s, t, t - begin, p, matrix + p * panel, ahead, y);
          }
      }
    }
  }
}

}  // namespace product
