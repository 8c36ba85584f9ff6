// Softmax attention without the T x S matrix in memory, forward and backward, with masks and dropout.
//
// A block of queries meets all keys at once: its scores are a strip of BAND rows in cache. Keys and values of one head
// are packed when the head changes, so that all five products run on contiguous rows.
#pragma once
#include "kernel.h"
#include "random.h"
#include "vectors.h"

namespace vm {
constexpr int64_t BAND = 32;  // queries whose scores are in cache together; codegen/library/templates.py sizes the scratch by it

// Rows in scratch are whole cache lines, as in codegen/library/templates.py.
template <typename T> inline int64_t padded(int64_t n) { return vm_groups(n, 64 / sizeof(T)) * (64 / sizeof(T)); }

constexpr int TILE_ROWS = REGISTERS == 32 ? 4 : 6, TILE_VECTORS = REGISTERS == 32 ? 4 : 2;  // sums that registers hold

// c[R, C lanes] = (add ? c : 0) + a[R, depth] b[depth, C lanes]
template <typename T, int R, int C>
inline void tile(int64_t depth, const T* a, int64_t row, int64_t column, const T* b, int64_t b_row, T* c, int64_t c_row,
                 bool add) {
  using V = typename Lanes<T>::type;
  constexpr int64_t L = Lanes<T>::count;
  V sum[R][C];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int n = 0; n < C; ++n) sum[r][n] = add ? *(const V*)(c + r * c_row + n * L) : V{};
#pragma GCC unroll 1
  for (int64_t k = 0; k < depth; ++k) {
    V right[C];
#pragma GCC unroll 16
    for (int n = 0; n < C; ++n) right[n] = *(const V*)(b + k * b_row + n * L);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const T left = a[r * row + k * column];
#pragma GCC unroll 16
      for (int n = 0; n < C; ++n) sum[r][n] += left * right[n];
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int n = 0; n < C; ++n) *(V*)(c + r * c_row + n * L) = sum[r][n];
}
template <typename T, int C>
__attribute__((noinline)) void stripe(int64_t rows, int64_t depth, const T* a, int64_t row, int64_t column, const T* b,
                                      int64_t b_row, T* c, int64_t c_row, bool add) {
  int64_t r = 0;
  for (; r + TILE_ROWS <= rows; r += TILE_ROWS)
    tile<T, TILE_ROWS, C>(depth, a + r * row, row, column, b, b_row, c + r * c_row, c_row, add);
  for (; r + 2 <= rows; r += 2) tile<T, 2, C>(depth, a + r * row, row, column, b, b_row, c + r * c_row, c_row, add);
  for (; r < rows; ++r) tile<T, 1, C>(depth, a + r * row, row, column, b, b_row, c + r * c_row, c_row, add);
}
// c[rows, columns] = (add ? c : 0) + a[rows, depth] b[depth, columns]; columns are whole vectors, a has any strides
template <typename T>
inline void multiply(int64_t rows, int64_t columns, int64_t depth, const T* a, int64_t row, int64_t column, const T* b,
                     int64_t b_row, T* c, int64_t c_row, bool add) {
  constexpr int64_t L = Lanes<T>::count, AT_ONCE = TILE_VECTORS * L;
  int64_t n = 0;
  for (; n + AT_ONCE <= columns; n += AT_ONCE)
    stripe<T, TILE_VECTORS>(rows, depth, a, row, column, b + n, b_row, c + n, c_row, add);
  for (; n < columns; n += L) stripe<T, 1>(rows, depth, a, row, column, b + n, b_row, c + n, c_row, add);
}
// to[rows, width] = from by strides, zeros up to `width`
template <typename T>
inline void pack(int64_t rows, int64_t columns, const T* from, int64_t row, int64_t column, T* to, int64_t width) {
  for (int64_t r = 0; r < rows; ++r) {
    if (column == 1) {
      for (int64_t c = 0; c < columns; ++c) to[r * width + c] = from[r * row + c];
    } else {
      for (int64_t c = 0; c < columns; ++c) to[r * width + c] = from[r * row + c * column];
    }
    for (int64_t c = columns; c < width; ++c) to[r * width + c] = T(0);
  }
}
// to[columns, width] = from[rows, columns]^T, whose columns lie side by side
inline void pack_turned(int64_t rows, int64_t columns, const float* from, int64_t row, float* to, int64_t width) {
  using V = Lanes<float>::type;
  constexpr int L = Lanes<float>::count;
  int64_t r = 0;
  for (; r + L <= rows; r += L) {
    int64_t c = 0;
    for (; c + L <= columns; c += L) {
      V block[L];
#pragma GCC unroll 16
      for (int i = 0; i < L; ++i) block[i] = *(const V*)(from + (r + i) * row + c);
      transpose(block);
#pragma GCC unroll 16
      for (int i = 0; i < L; ++i) *(V*)(to + (c + i) * width + r) = block[i];
    }
    for (; c < columns; ++c)
      for (int64_t i = 0; i < L; ++i) to[c * width + r + i] = from[(r + i) * row + c];
  }
  for (int64_t c = 0; c < columns; ++c) {
    for (int64_t i = r; i < rows; ++i) to[c * width + i] = from[i * row + c];
    for (int64_t i = rows; i < width; ++i) to[c * width + i] = 0.0f;
  }
}
// to[columns, width] = from[rows, columns]^T by strides, zeros up to `width`
template <typename T>
inline void pack_columns(int64_t rows, int64_t columns, const T* from, int64_t row, int64_t column, T* to, int64_t width) {
  if constexpr (sizeof(T) == 4) {
    if (column == 1) {
      pack_turned(rows, columns, from, row, to, width);
      return;
    }
  }
  pack(columns, rows, from, column, row, to, width);
}
template <typename T>
inline void unpack(int64_t rows, int64_t columns, const T* from, int64_t width, T* to, int64_t row, int64_t column,
                   T factor) {
  for (int64_t r = 0; r < rows; ++r) {
    if (column == 1) {
      for (int64_t c = 0; c < columns; ++c) to[r * row + c] = factor * from[r * width + c];
    } else {
      for (int64_t c = 0; c < columns; ++c) to[r * row + c * column] = factor * from[r * width + c];
    }
  }
}

// Asks for rows that will be packed soon: they lie apart, where processors do not fetch ahead on their own.
template <typename T> inline void ahead(int64_t rows, int64_t columns, const T* from, int64_t row) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns; c += Lanes<T>::count) __builtin_prefetch(from + r * row + c, 0, 2);
}

// What forward and backward share. Integers after the blocks: batch, heads, queries, keys, size of a head, how many
// arrays dropout reads (0: there is none, 1: the seed, 2: the seed and p, a double), its stream, then as bits of doubles
// its threshold, 1 / (1 - p), and the scale; then (batch, head, row, column) strides per array.
template <typename T> struct Attention {
  int64_t blocks, heads, queries, keys, size, pairs, key_width, width;
  bool drops;
  uint64_t random;
  float threshold;
  T kept, scale;
  const int64_t* strides;

  Attention(const int64_t* n, void* const* given)
      : blocks(n[0]), heads(n[2]), queries(n[3]), keys(n[4]), size(n[5]), pairs(n[1] * n[2]),
        key_width(padded<T>(keys)), width(padded<T>(size)), drops(n[6]),
        random(drops ? random_key(*(const int64_t*)given[0], n[7]) : 0), threshold((float)bits64(n[8])),
        kept((T)bits64(n[9])), scale((T)bits64(n[10])), strides(n + 11) {
    if (n[6] < 2) return;
    const double p = *(const double*)given[1];
    threshold = (float)(ceil(p * 16777216.0) / 16777216.0);
    kept = (T)(1.0 / (1.0 - p));
  }

  int64_t at(int array, int64_t pair, int64_t row) const {
    const int64_t* s = strides + 4 * array;
    return pair / heads * s[0] + pair % heads * s[1] + row * s[2];
  }
  int64_t row(int array) const { return strides[4 * array + 2]; }
  int64_t column(int array) const { return strides[4 * array + 3]; }

  // scale * score, then each mask: numbers are added, truth values put `fill` in place
  void masked(T* score, int64_t pair, int64_t query, void* const* masks, const int64_t* n, int64_t count) const {
    const int64_t keys = this->keys;
    const T scale = this->scale;
#pragma omp simd
    for (int64_t j = 0; j < keys; ++j) score[j] *= scale;
    for (int64_t m = 0; m < count; ++m, n += 6) {
      const int64_t offset = pair / heads * n[2] + pair % heads * n[3] + query * n[4], step = n[5];
      if (n[0]) {
        const uint8_t* mask = (const uint8_t*)masks[m] + offset;
        const T fill = (T)bits64(n[1]);
#pragma omp simd
        for (int64_t j = 0; j < keys; ++j) score[j] = mask[j * step] ? fill : score[j];
      } else {
        const T* mask = (const T*)masks[m] + offset;
#pragma omp simd
        for (int64_t j = 0; j < keys; ++j) score[j] += mask[j * step];
      }
    }
  }
  // zeros where a mask has put a constant in place of the score
  void cut(T* change, int64_t pair, int64_t query, void* const* masks, const int64_t* n, int64_t count) const {
    for (int64_t m = 0; m < count; ++m, n += 6) {
      if (!n[0]) continue;
      const uint8_t* mask = (const uint8_t*)masks[m] + pair / heads * n[2] + pair % heads * n[3] + query * n[4];
      const int64_t step = n[5];
#pragma omp simd
      for (int64_t j = 0; j < keys; ++j) change[j] = mask[j * step] ? T(0) : change[j];
    }
  }
};

// q, k, v, [seed, [p]], masks -> y, logsumexp; arrays with strides: q, k, v, y
template <typename T, int M> inline void fused_attention(void** pointers, const int64_t* integers) {
  void* const* masks = pointers + 3 + integers[6];
  const Attention<T> at(integers, pointers + 3);
  T *y = (T*)masks[M], *logsumexp = (T*)masks[M + 1], *scratch = (T*)masks[M + 2];
  const int64_t *mask_numbers = at.strides + 16, bands = vm_groups(at.queries, BAND), units = at.pairs * bands;
  const int64_t keys = at.keys, W = at.key_width, D = at.width;
  const int64_t part = at.size * W + keys * D + BAND * (W + D);
#pragma omp parallel for num_threads(vm_team(at.blocks)) if (vm_team(at.blocks) > 1) schedule(static, 1)
  for (int64_t block = 0; block < at.blocks; ++block) {
    T *kt = scratch + block * part, *v = kt + at.size * W, *scores = v + keys * D, *out = scores + BAND * W;
    int64_t packed = -1;
    for (int64_t unit = units * block / at.blocks; unit < units * (block + 1) / at.blocks; ++unit) {
      const int64_t pair = unit / bands, first = unit % bands * BAND, rows = vm_least(BAND, at.queries - first);
      if (pair != packed) {
        pack_columns(keys, at.size, (const T*)pointers[1] + at.at(1, pair, 0), at.row(1), at.column(1), kt, W);
        pack(keys, at.size, (const T*)pointers[2] + at.at(2, pair, 0), at.row(2), at.column(2), v, D);
        packed = pair;
      }
      if (const int64_t next = pair + 1; next < at.pairs) {
        const int64_t share = vm_groups(keys, bands), from = unit % bands * share, count = vm_least(share, keys - from);
        for (int array = 1; array < 3; ++array)
          ahead(count, at.size, (const T*)pointers[array] + at.at(array, next, from), at.row(array));
        ahead(rows, at.size, (const T*)pointers[0] + at.at(0, next, first), at.row(0));
      }
      multiply(rows, W, at.size, (const T*)pointers[0] + at.at(0, pair, first), at.row(0), at.column(0), kt, W, scores,
               W, false);
      // Without masks the scale, if it keeps the order, is left to the exponential.
      const bool plain = M == 0 && at.scale > T(0);
      const T scale = plain ? at.scale : T(1);
      T factor[BAND];
      for (int64_t r = 0; r < rows; ++r) {
        T* s = scores + r * W;
        if (!plain) at.masked(s, pair, first + r, masks, mask_numbers, M);
        T top = lowest<T>(), total = 0;
#pragma omp simd reduction(max : top)
        for (int64_t j = 0; j < keys; ++j) top = s[j] > top ? s[j] : top;
        top = top == lowest<T>() ? T(0) : top;
        if (at.drops) {
          const uint64_t random = at.random, start = (uint64_t)(pair * at.queries + first + r) * keys;
          const float threshold = at.threshold;
#pragma omp simd reduction(+ : total)
          for (int64_t j = 0; j < keys; ++j) {
            const T value = exp(scale * (s[j] - top));
            total += value;
            s[j] = uniform_float(random, start + j) >= threshold ? value : T(0);
          }
        } else {
#pragma omp simd reduction(+ : total)
          for (int64_t j = 0; j < keys; ++j) {
            s[j] = exp(scale * (s[j] - top));
            total += s[j];
          }
        }
        logsumexp[pair * at.queries + first + r] = scale * top + log(total);
        factor[r] = (at.drops ? at.kept : T(1)) / total;
      }
      multiply(rows, D, keys, scores, W, (int64_t)1, v, D, out, D, false);
      for (int64_t r = 0; r < rows; ++r)
        unpack(1, at.size, out + r * D, D, y + at.at(3, pair, first + r), at.row(3), at.column(3), factor[r]);
    }
  }
}

// grad, q, k, v, y, logsumexp, [seed, [p]], masks -> gq, gk, gv; arrays with strides: grad, q, k, v, y, gq, gk, gv
template <typename T, int M> inline void fused_attention_grad(void** pointers, const int64_t* integers) {
  void* const* masks = pointers + 6 + integers[6];
  const Attention<T> at(integers, pointers + 6);
  const T* logsumexp = (const T*)pointers[5];
  T *gq = (T*)masks[M], *gk = (T*)masks[M + 1], *gv = (T*)masks[M + 2], *scratch = (T*)masks[M + 3];
  const int64_t* mask_numbers = at.strides + 32;
  const int64_t keys = at.keys, size = at.size, W = at.key_width, D = at.width;
  const int64_t part = 2 * size * W + 3 * keys * D + BAND * (2 * W + 3 * D);
#pragma omp parallel for num_threads(vm_team(at.blocks)) if (vm_team(at.blocks) > 1) schedule(static, 1)
  for (int64_t block = 0; block < at.blocks; ++block) {
    T *kt = scratch + block * part, *vt = kt + size * W, *k = vt + size * W, *sum_k = k + keys * D;
    T *sum_v = sum_k + keys * D, *scores = sum_v + keys * D, *change = scores + BAND * W, *q = change + BAND * W;
    T *g = q + BAND * D, *out = g + BAND * D;
    for (int64_t pair = at.pairs * block / at.blocks; pair < at.pairs * (block + 1) / at.blocks; ++pair) {
      const T *keys_at = (const T*)pointers[2] + at.at(2, pair, 0), *values_at = (const T*)pointers[3] + at.at(3, pair, 0);
      pack_columns(keys, size, keys_at, at.row(2), at.column(2), kt, W);
      pack(keys, size, keys_at, at.row(2), at.column(2), k, D);
      pack_columns(keys, size, values_at, at.row(3), at.column(3), vt, W);
      for (int64_t i = 0; i < 2 * keys * D; ++i) sum_k[i] = T(0);
      for (int64_t first = 0; first < at.queries; first += BAND) {
        const int64_t rows = vm_least(BAND, at.queries - first);
        if (const int64_t next = pair + 1; next < at.pairs) {
          for (int array = 0; array < 5; ++array) {
            const int64_t count = array == 2 || array == 3 ? vm_least(rows, keys - first) : rows;
            ahead(count, size, (const T*)pointers[array] + at.at(array, next, first), at.row(array));
          }
        }
        pack(rows, size, (const T*)pointers[1] + at.at(1, pair, first), at.row(1), at.column(1), q, D);
        pack(rows, size, (const T*)pointers[0] + at.at(0, pair, first), at.row(0), at.column(0), g, D);
        multiply(rows, W, size, q, D, (int64_t)1, kt, W, scores, W, false);
        multiply(rows, W, size, g, D, (int64_t)1, vt, W, change, W, false);
        for (int64_t r = 0; r < rows; ++r) {
          T *s = scores + r * W, *c = change + r * W;
          if (M > 0) at.masked(s, pair, first + r, masks, mask_numbers, M);
          const T scale = M > 0 ? T(1) : at.scale;
          const T* row = (const T*)pointers[4] + at.at(4, pair, first + r);
          const int64_t step = at.column(4);
          T delta = 0;
          if (step == 1) {
#pragma omp simd reduction(+ : delta)
            for (int64_t e = 0; e < size; ++e) delta += g[r * D + e] * row[e];
          } else {
            for (int64_t e = 0; e < size; ++e) delta += g[r * D + e] * row[e * step];
          }
          const T level = logsumexp[pair * at.queries + first + r];
          const uint64_t start = (uint64_t)(pair * at.queries + first + r) * keys;
          if (at.drops) {
            const uint64_t random = at.random;
            const float threshold = at.threshold;
            const T kept = at.kept;
#pragma omp simd
            for (int64_t j = 0; j < keys; ++j) {
              const T p = exp(scale * s[j] - level);
              const T stays = uniform_float(random, start + j) >= threshold ? kept : T(0);
              s[j] = p * stays;
              c[j] = p * (c[j] * stays - delta);
            }
          } else {
#pragma omp simd
            for (int64_t j = 0; j < keys; ++j) {
              const T p = exp(scale * s[j] - level);
              s[j] = p;
              c[j] = p * (c[j] - delta);
            }
          }
          at.cut(c, pair, first + r, masks, mask_numbers, M);
        }
        multiply(rows, D, keys, change, W, (int64_t)1, k, D, out, D, false);
        unpack(rows, size, out, D, gq + at.at(5, pair, first), at.row(5), at.column(5), at.scale);
        multiply(keys, D, rows, change, (int64_t)1, W, q, D, sum_k, D, true);
        multiply(keys, D, rows, scores, (int64_t)1, W, g, D, sum_v, D, true);
      }
      unpack(keys, size, sum_k, D, gk + at.at(6, pair, 0), at.row(6), at.column(6), at.scale);
      unpack(keys, size, sum_v, D, gv + at.at(7, pair, 0), at.row(7), at.column(7), T(1));
    }
  }
}
}  // namespace vm
