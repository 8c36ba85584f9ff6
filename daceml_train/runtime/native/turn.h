// A mutex that refuses its own owner: a program that calls itself fails with a sentence, where a plain mutex would hang.
#pragma once

#include <atomic>
#include <mutex>
#include <stdexcept>
#include <thread>

namespace daceml {

class Turn {
 public:
  // Throws std::runtime_error if the calling thread holds it.
  void lock() {
    if (owner_.load(std::memory_order_relaxed) == std::this_thread::get_id()) {
      throw std::runtime_error("the plan, or another plan on the same arena, is already running on this thread");
    }
    mutex_.lock();
    owner_.store(std::this_thread::get_id(), std::memory_order_relaxed);
  }

  void unlock() {
    owner_.store(std::thread::id(), std::memory_order_relaxed);
    mutex_.unlock();
  }

 private:
  std::mutex mutex_;
  std::atomic<std::thread::id> owner_{};
};

}  // namespace daceml
