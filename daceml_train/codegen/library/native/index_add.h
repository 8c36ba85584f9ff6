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

// pointers: table, indices, rows. A block adds some columns of all rows, so none meets another.
template <typename T, typename I>
void add(void** pointers, const int64_t* integers) {
  constexpr int64_t LINE = 64 / sizeof(T);
  int64_t blocks = integers[0];
  Shape s;
  memcpy(&s, integers + 1, sizeof(Shape));
  int64_t lines = (s.width + LINE - 1) / LINE;
  const I* indices = (const I*)pointers[1];
#pragma omp parallel for num_threads(vm_team(blocks)) schedule(static) if (vm_team(blocks) > 1)
  for (int64_t block = 0; block < blocks; ++block) {
    int64_t begin = lines * block / blocks * LINE, end = lines * (block + 1) / blocks * LINE;
    int64_t count = (end < s.width ? end : s.width) - begin;
    for (int64_t i = 0, g = 0; i < s.count; ++g)
      for (int64_t k = 0; k < s.within; ++k, ++i) {
        int64_t place = (int64_t)indices[i * s.index];
        if (place < s.first || place >= s.last || place == s.skipped) continue;
        T* to = (T*)pointers[0] + (place - s.first) * s.table_row + begin * s.table_column;
        const T* from = (const T*)pointers[2] + g * s.group + k * s.row + begin * s.column;
        if (s.table_column == 1 && s.column == 1)
          for (int64_t c = 0; c < count; ++c) to[c] += from[c];
        else
          for (int64_t c = 0; c < count; ++c) to[c * s.table_column] += from[c * s.column];
      }
  }
}

}  // namespace rows
