// One buffer for all planned values of one or several plans. It only grows, and growing keeps the contents.
#pragma once

#include <sys/mman.h>

#include <mutex>
#include <new>

#include "pool.h"
#include "turn.h"

namespace daceml {

class Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena() {
    if (base_ != nullptr) munmap(base_, capacity_);
  }

  // Aligned to 2 MiB. Valid until the next growth; hold `turn` while using it.
  char* base() const { return base_; }
  size_t capacity() const { return capacity_; }
  Turn turn;

  // Throws std::bad_alloc; the old buffer is then unchanged.
  void grow(size_t bytes) {
    if (bytes <= capacity_) return;
    const size_t wanted = round_up(bytes, page_bytes);
    void* range = mmap(nullptr, wanted + huge_page_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (range == MAP_FAILED) throw std::bad_alloc();
    char* start = static_cast<char*>(range);
    char* aligned = reinterpret_cast<char*>(round_up(reinterpret_cast<uintptr_t>(range), huge_page_bytes));
    if (aligned > start) munmap(start, static_cast<size_t>(aligned - start));
    const size_t excess = static_cast<size_t>(start + huge_page_bytes - aligned);
    if (excess > 0) munmap(aligned + wanted, excess);
    madvise(aligned, wanted, MADV_HUGEPAGE);
    // Moving page tables costs nothing next to copying, and both ends are aligned for huge pages.
    if (base_ != nullptr && mremap(base_, capacity_, capacity_, MREMAP_MAYMOVE | MREMAP_FIXED, aligned) == MAP_FAILED) {
      munmap(aligned, wanted);
      throw std::bad_alloc();
    }
    base_ = aligned;
    capacity_ = wanted;
  }

 private:
  char* base_ = nullptr;
  size_t capacity_ = 0;
};

}  // namespace daceml
