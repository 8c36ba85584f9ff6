// A plan: the values and the launches of one compiled program, and how they are run.
#pragma once

#include <time.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "arena.h"
#include "call.h"
#include "control.h"
#include "lanes.h"
#include "launch.h"
#include "levels.h"
#include "lifetime.h"
#include "pool.h"
#include "team.h"

namespace daceml {

inline double now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

class Plan {
 public:
  Plan(int slots, std::shared_ptr<Arena> arena) : values(slots), arena_(std::move(arena)) {}

  Values values;
  Turn turn;

  // Appends a launch; returns its position.
  int add(Step step, int tag, int index, std::vector<int> uses, std::vector<int> defines = {}) {
    open();
    launches_.push_back({step, tag, index, std::move(uses), std::move(defines), {}});
    return static_cast<int>(launches_.size()) - 1;
  }

  int add_kernel(Kernel kernel, int tag) {
    std::vector<int> uses;
    for (const Place& place : kernel.pointers) uses.push_back(place.slot);
    kernels_.push_back(std::move(kernel));
    return add(Step::kernel, tag, last(kernels_), std::move(uses));
  }

  int add_product(Product product, int tag) {
    std::vector<int> uses;
    for (int view : {product.bias, product.a, product.b, product.out}) {
      if (view >= 0) uses.push_back(values.view(view).slot);
    }
    products_.push_back(std::move(product));
    return add(Step::product, tag, last(products_), std::move(uses));
  }

  int add_call(Call call, int tag) {
    call.complete();
    std::vector<int> uses, defines;
    for (int view : call.views()) uses.push_back(values.view(view).slot);
    for (const Result& result : call.results()) {
      if (result.view >= 0) uses.push_back(values.view(result.view).slot);
      if (result.slot >= 0) defines.push_back(result.slot);
    }
    calls_.push_back(std::move(call));
    return add(Step::call, tag, last(calls_), std::move(uses), std::move(defines));
  }

  int add_copy(Copy copy, int tag) {
    std::vector<int> uses;
    for (const Copy::Part& part : copy.parts) uses.insert(uses.end(), {part.from.slot, part.to.slot});
    copies_.push_back(std::move(copy));
    return add(Step::copy, tag, last(copies_), std::move(uses));
  }

  int add_control(Control control, int tag) {
    std::vector<int> uses;
    for (int view : control.views()) uses.push_back(values.view(view).slot);
    std::vector<int> defines = control.results;
    controls_.push_back(std::move(control));
    return add(Step::control, tag, last(controls_), std::move(uses), std::move(defines));
  }

  int add_levels(Levels levels, int tag) {
    std::vector<int> uses;
    for (int view : levels.operands) uses.push_back(values.view(view).slot);
    std::vector<int> defines = levels.results;
    levels_.push_back(std::move(levels));
    return add(Step::levels, tag, last(levels_), std::move(uses), std::move(defines));
  }

  // Lets this plan run for any number of rows up to that for which its arena is planned. `samples` are this plan and equal
  // ones for other numbers of rows.
  void vary(const std::vector<Plan*>& samples, const std::vector<int64_t>& rows) {
    std::vector<std::vector<int64_t*>> integers;
    for (Plan* plan : samples) {
      TORCH_CHECK_VALUE(plan->controls_.empty() && plan->levels_.empty(), "control flow in a cell of levels");
      for (size_t i = 0; i < calls_.size(); ++i) {
        TORCH_CHECK_VALUE(plan->calls_.size() == calls_.size() && plan->calls_[i].same_constants(calls_[i]),
                          "a library call in a cell of levels that takes the number of rows as an argument");
      }
      integers.push_back(plan->integers());
    }
    varying_.fit(integers, rows);
    rows_ = rows[0];
  }

  void set_rows(int64_t rows) {
    if (turn.was_left()) forget();
    if (rows == rows_) return;
    rows_ = rows;
    varying_.set(rows);
    for (Slot& slot : values.slots) {
      if (slot.home != Home::arena && slot.home != Home::unset) slot.layout.measure();
    }
    for (View& view : values.views) {
      view.layout.measure();
      view.bound = nullptr;
      view.tensor.reset();
    }
  }

  // Where the next run puts its fresh outputs, one address per output. Others are copied there.
  void place(std::vector<char*> places) { places_ = std::move(places); }

  const Layout& input_layout(size_t index) const {
    for (int slot : bound_) {
      if (values.slots[slot].index == static_cast<int>(index)) return values.slots[slot].layout;
    }
    TORCH_CHECK_VALUE(false, "a body has no input ", index);
  }

  const Layout& output_layout(size_t index) const { return values.slots[outputs_[index]].layout; }

  // Checks the whole list and closes it.
  void finalize(int64_t arena_bytes, std::vector<int> outputs) {
    open();
    Lifetime(values, launches_).check(arena_bytes, outputs);
    size_t most = 1;
    for (const Kernel& kernel : kernels_) most = std::max(most, kernel.pointers.size());
    pointers_ = most;
    scratch_.assign(1, std::vector<void*>(most));
    for (size_t i = 0; i < values.slots.size(); ++i) {
      const Slot& slot = values.slots[i];
      if (slot.owned()) owned_.push_back(static_cast<int>(i));
      if (slot.home != Home::input) continue;
      bound_.push_back(static_cast<int>(i));
      inputs_ = std::max(inputs_, static_cast<size_t>(slot.index) + 1);
    }
    arena_bytes_ = static_cast<size_t>(arena_bytes);
    outputs_ = std::move(outputs);
    seconds_.assign(launches_.size(), 0.0);
    begun_.assign(launches_.size(), 0.0);
    final_ = true;
  }

  // The most threads per launch: 0 for all, negative for those of the launch before it. An empty list, the default, means
  // all threads for all launches. Hold `turn`.
  void use_threads(std::vector<int> threads) {
    TORCH_CHECK_VALUE(threads.empty() || threads.size() == launches_.size(), "the plan has ", launches_.size(),
                      " launches, given threads for ", threads.size());
    threads_ = std::move(threads);
  }

  // Which launches run side by side; none, the default, runs them in order. Views of launches that run side by side must
  // not be shared: they are bound as they run. Hold `turn`.
  void use_lanes(std::vector<Lanes::Segment> segments, std::vector<std::vector<int>> waits) {
    TORCH_CHECK_VALUE(final_, "the plan is not finalised");
    lanes_.set(std::move(segments), std::move(waits), launches_.size());
    scratch_.resize(lanes_.most());
    for (std::vector<void*>& scratch : scratch_) scratch.resize(pointers_);
  }

  // Runs all launches; `outputs` receives one owned `at::Tensor*` per output. Throws InputMismatch before anything has run,
  // and whatever a launch throws; `current()` is then its position. Every owned value is gone afterwards. Hold `turn`.
  void run(void* const* inputs, size_t count, void** outputs, bool profile) {
    if (C10_UNLIKELY(turn.was_left())) forget();
    current_ = -1;
    TORCH_CHECK(final_, "the plan is not finalised");
    TORCH_CHECK(count == inputs_, "the plan takes ", inputs_, " inputs, given ", count);
    const auto* const* tensors = reinterpret_cast<const c10::TensorImpl* const*>(inputs);
    for (int index : bound_) {
      const Slot& slot = values.slots[index];
      const c10::TensorImpl* tensor = tensors[slot.index];
      if (slot.is_opaque && tensor != nullptr) continue;
      if (C10_UNLIKELY(tensor == nullptr || !fits(*tensor, slot.layout))) refuse(slot.index, tensor, slot.layout);
    }
    const PlainDispatch guards;
    const std::lock_guard<Turn> arena_guard(arena_->turn);
    Cleanup cleanup{*this, inputs};
    bind(inputs);
    if (profile) {
      launch<true>();
    } else {
      launch<false>();
    }
    for (size_t i = 0; i < outputs_.size(); ++i) outputs[i] = new at::Tensor(values.slots[outputs_[i]].value);
  }

  // Whether these inputs have the layouts that the plan expects; null stands for one that has.
  bool takes(void* const* inputs) const {
    return std::all_of(bound_.begin(), bound_.end(), [this, inputs](int index) {
      const Slot& slot = values.slots[index];
      const auto* tensor = static_cast<const c10::TensorImpl*>(inputs[slot.index]);
      return tensor == nullptr || slot.is_opaque || fits(*tensor, slot.layout);
    });
  }

  // The tag of the launch that ran last, -1 before the first.
  int current_tag() const { return current_ < 0 ? -1 : launches_[current_].tag; }
  size_t outputs() const { return outputs_.size(); }
  // Seconds per launch in the last profiled run, allocation of its fresh slots included.
  const std::vector<double>& seconds() const { return seconds_; }
  // Seconds from the start of that run to the begin of each launch.
  const std::vector<double>& begun() const { return begun_; }

 private:
  // Versions move even if a launch failed: it may have written before.
  struct Cleanup {
    Plan& plan;
    void* const* inputs;
    ~Cleanup() {
      for (int index : plan.owned_) plan.values.drop(index);
      for (int index : plan.bound_) {
        const Slot& slot = plan.values.slots[index];
        auto* tensor = static_cast<c10::TensorImpl*>(inputs[slot.index]);
        if (slot.is_opaque) plan.values.drop(index);
        if (slot.is_mutable && plan.current_ >= 0 && !tensor->is_inference()) tensor->bump_version();
      }
    }
  };

  template <class T>
  static int last(const std::vector<T>& list) {
    return static_cast<int>(list.size()) - 1;
  }

  at::Tensor fresh(int slot) const {
    for (size_t i = 0; i < places_.size(); ++i) {
      if (outputs_[i] == slot) return borrow(places_[i], values.slots[slot].layout);
    }
    return allocate(values.slots[slot].layout);
  }

  // Every integer that may depend on sizes, in a fixed order.
  std::vector<int64_t*> integers() {
    std::vector<int64_t*> all;
    const auto layout = [&all](Layout& each) {
      for (int64_t& size : each.sizes) all.push_back(&size);
      for (int64_t& stride : each.strides) all.push_back(&stride);
    };
    for (Kernel& kernel : kernels_) {
      for (Place& place : kernel.pointers) all.push_back(&place.offset);
      for (int64_t& integer : kernel.integers) all.push_back(&integer);
    }
    for (Copy& copy : copies_) {
      for (Copy::Part& part : copy.parts) {
        for (int64_t* integer : {&part.to.offset, &part.from.offset, &part.bytes}) all.push_back(integer);
      }
    }
    for (Slot& slot : values.slots) {
      all.push_back(&slot.offset);
      layout(slot.layout);
    }
    for (View& view : values.views) {
      all.push_back(&view.offset);
      layout(view.layout);
    }
    return all;
  }

  // Drops all that is kept from one run to the next: a thread left it half done when the process was forked.
  void forget() {
    for (int index : owned_) values.drop(index);
    for (View& view : values.views) {
      view.bound = nullptr;
      view.tensor.reset();
    }
    base_ = nullptr;
    if (rows_ >= 0) set_rows(std::exchange(rows_, -1));
  }

  void open() const { TORCH_CHECK_VALUE(!final_, "the plan is finalised: it takes no more launches"); }

  void bind(void* const* inputs) {
    for (int index : bound_) {
      Slot& slot = values.slots[index];
      auto* tensor = static_cast<c10::TensorImpl*>(inputs[slot.index]);
      if (slot.is_opaque) {
        slot.value = at::Tensor(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(tensor));
        continue;
      }
      // `mutable_data` ends a lazy copy; reading must not.
      slot.pointer = static_cast<char*>(slot.is_mutable ? tensor->mutable_data() : const_cast<void*>(tensor->data()));
    }
    arena_->grow(arena_bytes_);
    if (arena_->base() == base_) return;
    base_ = values.arena = arena_->base();
    for (Slot& slot : values.slots) {
      if (slot.home == Home::arena) slot.pointer = base_ + slot.offset;
    }
  }

  template <bool profile>
  void launch() {
    if constexpr (profile) start_ = now();
    if (lanes_.empty()) {
      Team team;
      for (size_t i = 0; i < launches_.size(); ++i) in_turn<profile>(static_cast<int>(i), team);
      return;
    }
    lanes_.begin();
    for (const Lanes::Segment& segment : lanes_.segments()) {
      if (segment.size() == 1) {
        Team team;
        for (int i : segment[0]) in_turn<profile>(i, team);
      } else {
        current_ = segment[0].empty() ? current_ : segment[0][0];
        lanes_.region(segment, [this](int i, int lane) { one<profile>(i, lane); }, current_);
      }
    }
  }

  // A launch on the calling thread, with threads of its own.
  template <bool profile>
  void in_turn(int i, Team& team) {
    current_ = i;
    if (!threads_.empty() && threads_[i] >= 0) team.use(threads_[i]);
    one<profile>(i, 0);
  }

  template <bool profile>
  void one(int i, int lane) {
    const Launch& launch = launches_[i];
    const double before = profile ? now() : 0.0;
    for (int slot : launch.fresh) values.own(slot, fresh(slot));
    switch (launch.step) {
      case Step::kernel: kernels_[launch.index].run(values, scratch_[lane].data()); break;
      case Step::product: products_[launch.index].run(values, rows_ >= 0); break;
      case Step::call: calls_[launch.index].run(values); break;
      case Step::release: values.drop(launch.index); break;
      case Step::copy: copies_[launch.index].run(values); break;
      case Step::control: controls_[launch.index].run(values); break;
      case Step::levels: levels_[launch.index].run(values); break;
    }
    if constexpr (profile) {
      begun_[i] = before - start_;
      seconds_[i] = now() - before;
    }
  }

  std::shared_ptr<Arena> arena_;
  std::vector<Launch> launches_;
  std::vector<Kernel> kernels_;
  std::vector<Product> products_;
  std::vector<Call> calls_;
  std::vector<Copy> copies_;
  std::vector<Control> controls_;
  std::vector<Levels> levels_;
  Varying varying_;
  int64_t rows_ = -1;
  std::vector<char*> places_;
  std::vector<int> owned_, bound_, outputs_, threads_;
  std::vector<std::vector<void*>> scratch_;  // per lane
  Lanes lanes_;
  std::vector<double> seconds_, begun_;
  double start_ = 0.0;
  size_t inputs_ = 0, arena_bytes_ = 0, pointers_ = 1;
  char* base_ = nullptr;
  int current_ = -1;
  bool final_ = false;
};

// A plan, and the call that is being added to it.
struct PlanHandle {
  Plan plan;
  std::unique_ptr<Call> call;
};

// What a run made, by whom it is owned from here on.
inline std::vector<at::Tensor> owned_by_caller(const std::vector<void*>& made) {
  std::vector<at::Tensor> outputs;
  outputs.reserve(made.size());
  for (void* output : made) {
    const std::unique_ptr<at::Tensor> owned(static_cast<at::Tensor*>(output));
    outputs.push_back(std::move(*owned));
  }
  return outputs;
}

inline std::vector<at::Tensor> Control::call(Plan& body, const std::vector<void*>& inputs) const {
  const std::lock_guard<Turn> guard(body.turn);
  std::vector<void*> made(body.outputs());
  body.run(inputs.data(), inputs.size(), made.data(), false);
  return owned_by_caller(made);
}

// The rows of one kind in one level.
inline void Levels::Run::group(int64_t level, size_t kind) {
  const Cell& cell = op.cells[kind];
  const int64_t first = bound(level, kind), count = bound(level + 1, kind) - first;
  if (count == 0) return;
  Plan& body = *cell.body;
  const std::lock_guard<Turn> guard(body.turn);
  body.set_rows(count);
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> kept;  // gathered rows, and what is to be added to rows
  for (int operand : cell.rows) inputs.push_back(borrow(at_row(given[operand], first), body.input_layout(inputs.size())));
  for (const Child& child : cell.children) check_children(rows_of(child, first), count, level, kind);
  if (op.reverse) {
    for (int state : cell.states) {
      inputs.push_back(borrow(at_row(made[state], starts[kind] + first), body.input_layout(inputs.size())));
    }
  } else {
    for (const Gather& each : cell.gathers) {
      const Layout& layout = body.input_layout(inputs.size());
      if (each.result < 0) kept.push_back(allocate(layout));
      char* to = each.result < 0 ? static_cast<char*>(kept.back().data_ptr()) : at_row(made[cell.own[each.result]], first);
      gather(cell, each, first, count, to);
      inputs.push_back(each.result < 0 ? kept.back() : borrow(to, layout));
    }
  }
  for (int operand : cell.shared) inputs.push_back(given[operand]);
  std::vector<char*> places;
  if (op.reverse) {
    int bases = 0;
    for (const Added& each : cell.added) bases = std::max(bases, each.output + 1);
    for (int i = 0; i < bases; ++i) {
      kept.push_back(allocate(body.output_layout(places.size())));
      places.push_back(static_cast<char*>(kept.back().data_ptr()));
    }
  } else {
    for (int state : cell.states) places.push_back(at_row(made[state], starts[kind] + first));
  }
  for (int i : cell.written) places.push_back(at_row(made[cell.own[i]], first));
  if (places.empty()) return;
  TORCH_CHECK(places.size() == body.outputs(), "a cell of levels makes ", body.outputs(), " values");
  std::vector<void*> addresses, outputs(places.size());
  for (const at::Tensor& input : inputs) addresses.push_back(input.unsafeGetTensorImpl());
  body.place(places);
  body.run(addresses.data(), addresses.size(), outputs.data(), false);
  for (size_t i = 0; i < places.size(); ++i) {
    const std::unique_ptr<at::Tensor> owned(static_cast<at::Tensor*>(outputs[i]));
    if (owned->nbytes() > 0 && owned->const_data_ptr() != places[i]) {
      std::memcpy(places[i], owned->const_data_ptr(), owned->nbytes());
    }
  }
  for (size_t i = 0; op.reverse && i < cell.children.size(); ++i) {
    const auto& [output, start] = cell.added[i];
    add(made[cell.children[i].state], rows_of(cell.children[i], first), kept[output], start, count);
  }
}

}  // namespace daceml
