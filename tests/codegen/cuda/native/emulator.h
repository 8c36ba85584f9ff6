// The part of CUDA that generated kernels use, on the CPU: each thread of a block is a fiber, and the next fiber to run
// is drawn at random, so that a kernel whose result depends on the order of its threads is found out. Blocks run one
// after the other, in random order. It proves results and barriers, and says nothing of speed.
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <ucontext.h>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
struct alignas(8) uint2 { uint32_t x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct Index { unsigned x = 0; };
static Index threadIdx, blockIdx;

namespace emulator {
static uint64_t seed = 1;
static inline uint64_t draw() {  // xorshift
  seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
  return seed;
}
struct Meeting { int arrived = 0; uint64_t round = 0; };
struct Fiber {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(256 << 10);
  bool done = false;
  const Meeting* waits = nullptr;
  uint64_t round = 0;
};
static ucontext_t scheduler;
static std::vector<std::unique_ptr<Fiber>> fibers;
struct Group { Meeting meeting; uint32_t shown[2][32]; };  // what threads show one another, in even and odd rounds
static Meeting all;
static std::map<uint64_t, Group> groups;  // by warp and mask
static std::map<int, Meeting> teams;
static const std::function<void()>* body;
static int running, threads_of_block;

static inline void run_fiber() {
  (*body)();
  fibers[running]->done = true;
  swapcontext(&fibers[running]->context, &scheduler);
}
static inline void meet(Meeting& at, int count) {
  if (++at.arrived == count) {
    at.arrived = 0;
    ++at.round;
    return;
  }
  Fiber& fiber = *fibers[running];
  fiber.waits = &at, fiber.round = at.round;
  swapcontext(&fiber.context, &scheduler);
}
static inline bool waiting(const Fiber& fiber) { return fiber.waits && fiber.waits->round == fiber.round; }

static inline int run_block(int64_t index, int threads) {
  all = Meeting(), groups.clear(), teams.clear();
  for (int t = 0; t < threads; ++t) {
    Fiber& fiber = *fibers[t];
    fiber.done = false, fiber.waits = nullptr;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data(), fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, run_fiber, 0);
  }
  std::vector<int> ready;
  for (;;) {
    ready.clear();
    bool left = false;
    for (int t = 0; t < threads; ++t) {
      left |= !fibers[t]->done;
      if (!fibers[t]->done && !waiting(*fibers[t])) ready.push_back(t);
    }
    if (!left) return 0;
    if (ready.empty()) return 1;  // threads wait for others that never come
    for (int i = (int)ready.size() - 1; i > 0; --i) std::swap(ready[i], ready[draw() % (i + 1)]);
    for (int t : ready) {
      fibers[t]->waits = nullptr;
      running = t, threadIdx.x = (unsigned)t, blockIdx.x = (unsigned)index;
      swapcontext(&scheduler, &fibers[t]->context);
    }
  }
}
static inline int launch(const std::function<void()>& kernel, int64_t blocks, int threads) {
  while ((int)fibers.size() < threads) fibers.push_back(std::make_unique<Fiber>());
  body = &kernel, threads_of_block = threads;
  std::vector<int64_t> order(blocks);
  for (int64_t i = 0; i < blocks; ++i) order[i] = i;
  for (int64_t i = blocks - 1; i > 0; --i) std::swap(order[i], order[draw() % (i + 1)]);
  for (int64_t index : order)
    if (run_block(index, threads)) return 1;
  return 0;
}
}  // namespace emulator

static inline void emulate_team_barrier(int team, int threads) { emulator::meet(emulator::teams[team], threads); }
static inline void emulate_barrier() { emulator::meet(emulator::all, emulator::threads_of_block); }
static inline uint32_t __shfl_xor_sync(uint32_t mask, uint32_t value, int across) {
  const unsigned me = threadIdx.x;
  auto& group = emulator::groups[(uint64_t)(me / 32) << 32 | mask];
  auto& shown = group.shown[group.meeting.round & 1];
  shown[me % 32] = value;
  int threads = 0;
  for (uint32_t rest = mask; rest; rest &= rest - 1) ++threads;
  emulator::meet(group.meeting, threads);
  return shown[(me ^ across) % 32];
}
extern "C" __attribute__((visibility("default"))) void emulator_seed(uint64_t seed) { emulator::seed = seed | 1; }
#ifndef WITHOUT_BARRIERS
#define __syncthreads emulate_barrier
#define team_barrier emulate_team_barrier
#else
#define __syncthreads()
#define team_barrier(team, threads)
#endif
