// A mutex that refuses its own owner: a program that calls itself fails with a sentence, where a plain mutex would hang.
// And one that survives a fork: a child does not have the thread that held it, so that it is free there.
#pragma once

#include <pthread.h>

#include <atomic>
#include <stdexcept>
#include <thread>

namespace daceml {

// How many forks lie between the first process and this one, and the thread that the last one has left.
struct Forks {
  inline static std::atomic<int> count{1};
  inline static std::atomic<std::thread::id> survivor{};
  inline static const int watched = pthread_atfork(nullptr, nullptr, [] {
    survivor.store(std::this_thread::get_id(), std::memory_order_relaxed);
    count.fetch_add(1, std::memory_order_relaxed);
  });
};

class Turn {
 public:
  // Throws std::runtime_error if the calling thread holds it.
  void lock() {
    const std::thread::id self = std::this_thread::get_id();
    const int now = Forks::count.load(std::memory_order_relaxed);
    for (int held = 0; !holder_.compare_exchange_strong(held, now, std::memory_order_acquire); held = 0) {
      const std::thread::id owner = owner_.load(std::memory_order_relaxed);
      // A new thread may have the number of one that the fork has ended.
      const bool lives = held == now || owner == Forks::survivor.load(std::memory_order_relaxed);
      if (lives && owner == self) {
        throw std::runtime_error("the plan, or another plan on the same arena, is already running on this thread");
      }
      if (lives) {
        holder_.wait(held, std::memory_order_relaxed);
      } else if (holder_.compare_exchange_strong(held, now, std::memory_order_acquire)) {
        left_ = true;
        break;
      }
    }
    owner_.store(self, std::memory_order_relaxed);
  }

  void unlock() {
    owner_.store(std::thread::id(), std::memory_order_relaxed);
    holder_.store(0, std::memory_order_release);
    holder_.notify_one();
  }

  // Whether a thread that the fork has ended was at work when this one got its turn; said once. Hold it.
  bool was_left() {
    const bool left = left_;
    left_ = false;
    return left;
  }

 private:
  std::atomic<int> holder_{0};  // the count of forks when it was taken, or 0
  std::atomic<std::thread::id> owner_{};
  bool left_ = false;
};

}  // namespace daceml
