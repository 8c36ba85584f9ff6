// Rows added to a table at the places that indices name.
#pragma once
#include "team.h"
#include <cstdint>
#include <cstring>

namespace rows {

// Sizes, and strides in elements, in the order in which the launch passes them after the number of blocks. The table
// holds rows `first` to `last` of a larger one; what belongs to other rows, or to row `skipped`, is left out.
struct Shape {
  int64_t count, width, first, last, skipped;
  int64_t table_row, table_column, index;
  int64_t within, group, row, column;  // of the rows: how many are a group, and the strides
};

// The rows of a block: some columns of all rows, so no block meets another. With `cleared`, the table is zero before.
template <typename T, typename I>
void sum(T* table, const I* indices, const T* rows, const int64_t* integers, bool cleared) {
  constexpr int64_t LINE = 64 / sizeof(T);
  int64_t blocks = integers[0];
  Shape s;
  memcpy(&s, integers + 1, sizeof(Shape));
  int64_t lines = (s.width + LINE - 1) / LINE;
#pragma omp parallel for num_threads(vm_team(blocks)) schedule(static) if (vm_team(blocks) > 1)
  for (int64_t block = 0; block < blocks; ++block) {
    int64_t begin = lines * block / blocks * LINE, end = lines * (block + 1) / blocks * LINE;
    int64_t count = (end < s.width ? end : s.width) - begin;
    if (cleared)
      for (int64_t r = 0; r < s.last - s.first; ++r) {
        T* to = table + r * s.table_row + begin * s.table_column;
        if (s.table_column == 1)
          memset(to, 0, count * sizeof(T));
        else
          for (int64_t c = 0; c < count; ++c) to[c * s.table_column] = 0;
      }
    for (int64_t i = 0, g = 0; i < s.count; ++g)
      for (int64_t k = 0; k < s.within; ++k, ++i) {
        int64_t place = (int64_t)indices[i * s.index];
        if (place < s.first || place >= s.last || place == s.skipped) continue;
        T* to = table + (place - s.first) * s.table_row + begin * s.table_column;
        const T* from = rows + g * s.group + k * s.row + begin * s.column;
        if (s.table_column == 1 && s.column == 1)
          for (int64_t c = 0; c < count; ++c) to[c] += from[c];
        else
          for (int64_t c = 0; c < count; ++c) to[c * s.table_column] += from[c * s.column];
      }
  }
}

// pointers: table, indices, rows.
template <typename T, typename I>
void add(void** pointers, const int64_t* integers) {
  sum((T*)pointers[0], (const I*)pointers[1], (const T*)pointers[2], integers, false);
}

// pointers: rows, indices, table.
template <typename T, typename I>
void gradient(void** pointers, const int64_t* integers) {
  sum((T*)pointers[2], (const I*)pointers[1], (const T*)pointers[0], integers, true);
}

}  // namespace rows
