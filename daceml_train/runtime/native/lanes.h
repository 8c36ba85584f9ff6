// Launches side by side: what each lane runs, one thread each, and which launches of other lanes a launch waits for.
#pragma once

#include <omp.h>

#include <atomic>
#include <exception>
#include <memory>
#include <thread>
#include <vector>

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include "pool.h"
#include "team.h"

namespace daceml {

// A known dispatch state: no autograd, autocast, tracing or Python mode of the caller leaks into the launches.
struct PlainDispatch {
  c10::impl::ForceDispatchKeyGuard dispatch{
      c10::default_included_set - c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView),
      c10::default_excluded_set | c10::autograd_dispatch_keyset_with_ADInplaceOrView};
  c10::NoGradGuard no_grad;
  Gate gate{true};
};

class Lanes {
 public:
  // Positions of launches per lane. The launches of a segment of one lane run on the calling thread, with threads of their
  // own; a segment begins when the one before it has ended.
  using Segment = std::vector<std::vector<int>>;

  bool empty() const { return segments_.empty(); }
  const std::vector<Segment>& segments() const { return segments_; }
  size_t most() const { return most_; }

  // Replaces the schedule of a list of `launches`. Throws if it leaves a launch out or could wait for ever.
  void set(std::vector<Segment> segments, std::vector<std::vector<int>> waits, size_t launches) {
    std::vector<int> seen(launches, -1);
    size_t most = 1;
    for (size_t number = 0; number < segments.size(); ++number) {
      most = std::max(most, segments[number].size());
      for (const std::vector<int>& lane : segments[number]) {
        int before = -1;
        for (int position : lane) {
          TORCH_CHECK_VALUE(position > before && position < static_cast<int>(launches) && seen[position] < 0,
                            "lanes run each launch once, in the order of the list; launch ", position);
          before = position;
          seen[position] = static_cast<int>(number);
        }
      }
    }
    if (!segments.empty()) {
      TORCH_CHECK_VALUE(waits.size() == launches, "the plan has ", launches, " launches, given waits for ", waits.size());
      for (size_t i = 0; i < launches; ++i) {
        TORCH_CHECK_VALUE(seen[i] >= 0, "no lane runs launch ", i);
        for (int earlier : waits[i]) {
          TORCH_CHECK_VALUE(earlier >= 0 && earlier < static_cast<int>(i) && seen[earlier] <= seen[i], "launch ", i,
                            " waits for ", earlier, ", which does not run before it");
        }
      }
    }
    segments_ = std::move(segments);
    waits_ = std::move(waits);
    most_ = most;
    done_ = std::make_unique<std::atomic<uint32_t>[]>(launches);
    epoch_ = 0;
  }

  void begin() { ++epoch_; }

  // Runs a segment of several lanes; `run(position, lane)` does one launch. Throws what the first launch that failed threw,
  // after all lanes have ended, and leaves its position in `failed`.
  template <class Run>
  void region(const Segment& segment, Run run, int& failed) {
    const int count = static_cast<int>(segment.size());
    std::atomic<bool> stop{false};
    std::exception_ptr error;
    const auto lane = [&](int number) {
      for (int position : segment[number]) {
        try {
          for (int earlier : waits_[position]) {
            if (!reached(earlier, stop)) return;
          }
          run(position, number);
          done_[position].store(epoch_, std::memory_order_release);
        } catch (...) {
          if (!stop.exchange(true)) {
            error = std::current_exception();
            failed = position;
          }
          return;
        }
      }
    };
#pragma omp parallel num_threads(count)
    {
      if (omp_get_num_threads() == count) {
        const PlainDispatch guards;
        Team team;
        team.use(1);
        lane(omp_get_thread_num());
      } else if (omp_get_thread_num() == 0) {  // a limit on threads: the launches one after the other
        in_order(segment, run, failed, error);
      }
    }
    if (error) std::rethrow_exception(error);
  }

 private:
  bool reached(int position, const std::atomic<bool>& stop) const {
    for (int spins = 0; done_[position].load(std::memory_order_acquire) != epoch_; ++spins) {
      if (stop.load(std::memory_order_relaxed)) return false;
      if (spins < 2000) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
      } else {
        std::this_thread::yield();  // another process has the core of the launch that is waited for
      }
    }
    return true;
  }

  template <class Run>
  static void in_order(const Segment& segment, Run run, int& failed, std::exception_ptr& error) {
    std::vector<int> all;
    for (const std::vector<int>& lane : segment) all.insert(all.end(), lane.begin(), lane.end());
    std::sort(all.begin(), all.end());
    for (int position : all) {
      try {
        run(position, 0);
      } catch (...) {
        error = std::current_exception();
        failed = position;
        return;
      }
    }
  }

  std::vector<Segment> segments_;
  std::vector<std::vector<int>> waits_;
  std::unique_ptr<std::atomic<uint32_t>[]> done_;  // per launch, the run in which it was done last
  uint32_t epoch_ = 0;
  size_t most_ = 1;
};

}  // namespace daceml
