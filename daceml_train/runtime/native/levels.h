// Recursion level by level: plans that take their number of rows at run time, as the cells of `levels`.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstring>
#include <vector>

#include <ATen/Dispatch.h>

#include "values.h"

namespace daceml {

class Plan;

// The integers of a plan that depend on the number of rows, each a line `base + slope * rows`.
struct Varying {
  struct Line {
    int64_t* at;
    int64_t base, slope;
  };
  std::vector<Line> lines;

  // `samples` has the same integers of equal plans for different numbers of rows, the first of them this plan's own.
  void fit(const std::vector<std::vector<int64_t*>>& samples, const std::vector<int64_t>& rows) {
    const size_t count = samples[0].size();
    for (const auto& other : samples) {
      TORCH_CHECK_VALUE(other.size() == count, "a body has other launches for another number of rows");
    }
    for (size_t i = 0; i < count; ++i) {
      const int64_t first = *samples[0][i], change = *samples[1][i] - first, step = rows[1] - rows[0];
      const int64_t slope = change / step, base = first - slope * rows[0];
      for (size_t k = 0; k < samples.size(); ++k) {
        TORCH_CHECK_VALUE(*samples[k][i] == base + slope * rows[k],
                          "integer ", i, " of a body is ", *samples[k][i], " for ", rows[k], " rows and ", first, " for ", rows[0],
                          ": no linear function of the number of rows");
      }
      if (slope != 0) lines.push_back({samples[0][i], base, slope});
    }
  }

  void set(int64_t rows) const {
    for (const Line& line : lines) *line.at = line.base + line.slope * rows;
  }
};

// Seconds per level of the last levels that this thread ran, in the order in which they ran.
inline std::vector<double>& level_seconds() {
  thread_local std::vector<double> seconds;
  return seconds;
}

// See `daceml_train.ops.levels`. Operands are views; all are dense, and their first size is their rows.
struct Levels {
  struct Child {
    int state, operand;
  };
  // An argument whose rows consist of rows of children, and the own result that it is, or -1.
  struct Gather {
    std::vector<int> children;
    int result;
  };
  // What is added to a child: from element `start` on of each row of an output.
  struct Added {
    int output, start;
  };
  struct Cell {
    Plan* body;
    int64_t count;
    std::vector<int> rows, shared, states, own;  // `own`: results, after the states
    std::vector<Child> children;
    std::vector<int> written;  // own results, by position in `own`, that the body returns
    std::vector<Gather> gathers;
    std::vector<Added> added;

    // `numbers`: per gather its result, the number of its children, and these.
    void gather(const std::vector<int>& numbers) {
      for (size_t i = 0; i < numbers.size();) {
        const int result = numbers[i], count = numbers[i + 1];
        const auto begin = numbers.begin() + static_cast<std::ptrdiff_t>(i) + 2;
        gathers.push_back({{begin, begin + count}, result});
        i += static_cast<size_t>(count) + 2;
      }
    }
  };
  std::vector<Cell> cells;
  std::vector<int> operands, results;
  int states;
  bool reverse;

  void run(Values& values) const {
    Run run(*this, values);
    const int64_t levels = run.levels;
    std::vector<double> seconds(static_cast<size_t>(levels));
    auto before = std::chrono::steady_clock::now();
    for (int64_t done = 0; done < levels; ++done) {
      const int64_t level = reverse ? levels - 1 - done : done;
      for (size_t kind = 0; kind < cells.size(); ++kind) run.group(level, kind);
      const auto now = std::chrono::steady_clock::now();
      seconds[static_cast<size_t>(done)] = std::chrono::duration<double>(now - before).count();
      before = now;
    }
    level_seconds() = std::move(seconds);
    for (size_t i = 0; i < results.size(); ++i) values.own(results[i], std::move(run.made[i]));
  }

 private:
  static int64_t row_bytes(const at::Tensor& tensor) {
    int64_t bytes = static_cast<int64_t>(tensor.element_size());
    for (int64_t d = 1; d < tensor.dim(); ++d) bytes *= tensor.size(d);
    return bytes;
  }

  template <class T>
  static void add_row(T* to, const T* from, int64_t width) {
#pragma omp simd
    for (int64_t j = 0; j < width; ++j) to[j] += from[j];
  }

  // Adds to rows of a state what begins at element `start` of each row of `values`.
  static void add(at::Tensor& state, const int64_t* rows, const at::Tensor& values, int64_t start, int64_t count) {
    const int64_t pitch = count > 0 ? values.numel() / count : 0;
    const int64_t width = row_bytes(state) / static_cast<int64_t>(state.element_size());
    AT_DISPATCH_ALL_TYPES_AND_COMPLEX_AND2(at::kHalf, at::kBFloat16, state.scalar_type(), "levels", [&] {
      auto* to = state.data_ptr<scalar_t>();
      const auto* from = values.const_data_ptr<scalar_t>() + start;
      for (int64_t r = 0; r < count; ++r) add_row(to + rows[r] * width, from + r * pitch, width);
    });
  }

  struct Run {
    const Levels& op;
    std::vector<at::Tensor> given, made;
    std::vector<int64_t> starts;
    const int64_t* bounds;
    int64_t kinds, levels;

    Run(const Levels& levels_, Values& values) : op(levels_), kinds(static_cast<int64_t>(levels_.cells.size())) {
      for (int view : op.operands) given.push_back(values.bind(view));
      bounds = given[0].const_data_ptr<int64_t>();
      levels = given[0].size(0) - 1;
      starts.push_back(0);
      for (const Cell& cell : op.cells) starts.push_back(starts.back() + cell.count);
      for (int slot : op.results) made.push_back(allocate(values.slot(slot).layout));
      check();
      for (int state = 0; state < op.states; ++state) {
        if (op.reverse) {
          made[state].copy_(given[1 + state]);
        } else {
          for (int64_t kind = 0; kind < kinds; ++kind) clear(made[state], kind, starts[kind]);
          for (int64_t kind = 0; kind < kinds; ++kind) {
            const std::vector<int>& own = op.cells[kind].states;
            if (std::find(own.begin(), own.end(), state) == own.end()) {
              clear(made[state], kind, starts[kind], false);
            }
          }
        }
      }
      for (int64_t kind = 0; kind < kinds; ++kind) {
        for (int result : op.cells[kind].own) clear(made[result], kind, 0);
      }
    }

    int64_t bound(int64_t level, int64_t kind) const { return bounds[level * kinds + kind]; }

    void check() const {
      TORCH_CHECK_VALUE(levels >= 0, "levels takes at least one row of bounds");
      for (int64_t kind = 0; kind < kinds; ++kind) {
        TORCH_CHECK_VALUE(bound(0, kind) == 0 && bound(levels, kind) <= op.cells[kind].count,
                          "the bounds of levels of kind ", kind, " are not in 0..", op.cells[kind].count);
        for (int64_t level = 0; level < levels; ++level) {
          TORCH_CHECK_VALUE(bound(level, kind) <= bound(level + 1, kind), "the bounds of levels of kind ", kind,
                            " are not sorted at level ", level);
        }
      }
    }

    // Zeros in the rows of a kind that no level contains, or in all of them.
    void clear(at::Tensor& tensor, int64_t kind, int64_t start, bool unused = true) {
      const int64_t bytes = row_bytes(tensor), used = unused ? bound(levels, kind) : 0;
      const int64_t rows = op.cells[kind].count - used;
      if (bytes * rows > 0) std::memset(static_cast<char*>(tensor.data_ptr()) + (start + used) * bytes, 0, bytes * rows);
    }

    void check_children(const int64_t* rows, int64_t count, int64_t level, size_t kind) const {
      for (int64_t r = 0; r < count; ++r) {
        TORCH_CHECK_VALUE(rows[r] >= 0 && rows[r] < starts.back(), "kind ", kind, " in level ", level, " reads row ",
                          rows[r], " of ", starts.back());
        int64_t other = 0;
        while (rows[r] >= starts[other + 1]) ++other;
        const int64_t own = rows[r] - starts[other];
        TORCH_CHECK_VALUE(own < bound(level, other) || own >= bound(levels, other), "kind ", kind, " in level ", level,
                          " reads row ", rows[r], ", which no earlier level computes");
      }
    }

    static char* at_row(const at::Tensor& tensor, int64_t row) {
      return static_cast<char*>(const_cast<void*>(tensor.const_data_ptr())) + row * row_bytes(tensor);
    }

    const int64_t* rows_of(const Child& child, int64_t first) const {
      return given[child.operand].const_data_ptr<int64_t>() + first;
    }

    // The rows of children next to each other, from `to` on.
    void gather(const Cell& cell, const Gather& gather, int64_t first, int64_t count, char* to) const {
      int64_t pitch = 0, start = 0;
      for (int k : gather.children) pitch += row_bytes(made[cell.children[k].state]);
      for (int k : gather.children) {
        const at::Tensor& state = made[cell.children[k].state];
        const int64_t* rows = rows_of(cell.children[k], first);
        const int64_t bytes = row_bytes(state);
        const char* from = static_cast<const char*>(state.const_data_ptr());
        for (int64_t r = 0; r < count; ++r) std::memcpy(to + r * pitch + start, from + rows[r] * bytes, bytes);
        start += bytes;
      }
    }

    void group(int64_t level, size_t kind);
  };
};

}  // namespace daceml
