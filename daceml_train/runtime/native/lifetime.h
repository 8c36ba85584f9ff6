// The check of a finished launch list: every value exists when it is used, and fits where it lives.
#pragma once

#include <vector>

#include "launch.h"
#include "values.h"

namespace daceml {

// Follows owned slots through the launches and decides where fresh ones are allocated. Throws c10::ValueError.
class Lifetime {
 public:
  Lifetime(Values& values, std::vector<Launch>& launches) : values_(values), launches_(launches) {}

  void check(int64_t arena_bytes, const std::vector<int>& outputs) {
    states_.assign(values_.slots.size(), State::absent);
    for (size_t i = 0; i < launches_.size(); ++i) follow(i);
    for (int slot : outputs) {
      TORCH_CHECK_VALUE(values_.slot(slot).owned(), "output slot ", slot, " is not owned by the plan: its memory would be "
                        "overwritten by the next run; copy it into a fresh slot");
      TORCH_CHECK_VALUE(states_[slot] == State::present, "output slot ", slot,
                        states_[slot] == State::absent ? " is never written" : " is released before the end");
    }
    check_arena(arena_bytes);
  }

 private:
  enum class State : uint8_t { absent, present, released };

  void follow(size_t i) {
    Launch& launch = launches_[i];
    const auto where = [&] { return c10::str("launch ", i, " (tag ", launch.tag, ")"); };
    for (int index : launch.uses) {
      const Slot& slot = values_.slot(index);
      TORCH_CHECK_VALUE(slot.home != Home::unset, where(), " uses slot ", index, ", which is not declared");
      TORCH_CHECK_VALUE(!slot.is_opaque || launch.step == Step::call, where(), " reads slot ", index,
                        ", whose layout only a library knows");
      if (!slot.owned()) continue;
      TORCH_CHECK_VALUE(states_[index] != State::released, where(), " uses slot ", index, " after its release");
      if (states_[index] == State::present) continue;
      TORCH_CHECK_VALUE(slot.home == Home::fresh, where(), " uses slot ", index, " before a call produced it");
      launch.fresh.push_back(index);
      states_[index] = State::present;
    }
    for (int index : launch.defines) {
      const Slot& slot = values_.slot(index);
      TORCH_CHECK_VALUE(slot.home == Home::result, where(), " returns into slot ", index,
                        ", which is no result slot; give a view of it to copy into its memory");
      TORCH_CHECK_VALUE(states_[index] == State::absent, where(), " produces slot ", index, " a second time");
      states_[index] = State::present;
    }
    if (launch.step == Step::release) {
      const int index = launch.index;
      TORCH_CHECK_VALUE(values_.slot(index).owned(), where(), " releases slot ", index, ", which the plan does not own");
      TORCH_CHECK_VALUE(states_[index] == State::present, where(), " releases slot ", index, ", which holds nothing");
      states_[index] = State::released;
    }
  }

  void check_arena(int64_t arena_bytes) {
    for (size_t i = 0; i < values_.slots.size(); ++i) {
      const Slot& slot = values_.slots[i];
      TORCH_CHECK_VALUE(slot.home != Home::result || slot.offset < 0 || slot.offset + slot.layout.bytes <= arena_bytes,
                        "slot ", i, " at offset ", slot.offset, " leaves the arena of ", arena_bytes, " bytes");
      TORCH_CHECK_VALUE(slot.home != Home::arena || (slot.offset >= 0 && slot.offset <= arena_bytes), "slot ", i,
                        " at offset ", slot.offset, " leaves the arena of ", arena_bytes, " bytes");
    }
    for (const View& view : values_.views) {
      const Slot& slot = values_.slots[view.slot];
      TORCH_CHECK_VALUE(slot.home != Home::arena || slot.offset + view.offset + view.layout.bytes <= arena_bytes,
                        "a view of slot ", view.slot, " ends at ", slot.offset + view.offset + view.layout.bytes,
                        ", past the arena of ", arena_bytes, " bytes");
    }
  }

  Values& values_;
  std::vector<Launch>& launches_;
  std::vector<State> states_;
};

}  // namespace daceml
