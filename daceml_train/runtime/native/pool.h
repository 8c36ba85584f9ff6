// A caching CPU allocator in place of PyTorch's own: best fit with coalescing over one reserved address range.
//
// A fresh page costs 1.2-2 microseconds per 4 KiB on first touch, and glibc hands large blocks back to the system at every
// free. The pool keeps them. It serves only threads whose gate is on; for every other allocation it calls the allocator
// that it replaced. Ownership of a pointer is a range check, so blocks may be freed from any thread, gate on or off.
#pragma once

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

namespace daceml {

constexpr size_t page_bytes = 4096;
constexpr size_t huge_page_bytes = size_t{1} << 21;

inline size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Bytes. `in_use` counts blocks handed out, `free` resident blocks kept for reuse, `high_water` the largest `in_use`.
struct PoolStatistics {
  int64_t in_use, free, high_water;
};

class Pool final : public c10::Allocator {
 public:
  // Never destroyed: tensors that escaped to the user may be freed during interpreter shutdown.
  static Pool& instance() {
    static Pool* pool = new Pool();
    return *pool;
  }

  static bool& gate() {
    static thread_local bool open = false;
    return open;
  }

  // Memory that lies ready for a result of the library call that runs on this thread. A request of just this size gets
  // it; what the call frees before it ends may be had once more, so that a temporary array keeps no result out.
  struct Offer {
    char* address;
    size_t bytes;
    bool taken;
  };
  static std::vector<Offer>& offers() {
    static thread_local std::vector<Offer> made;
    return made;
  }

  c10::DataPtr allocate(size_t bytes) override {
    if (gate() && bytes >= page_bytes) {
      for (Offer& offer : offers()) {
        if (offer.taken || offer.bytes != bytes) continue;
        offer.taken = true;
        return {offer.address, offer.address, &Pool::put_back, c10::Device(c10::kCPU)};
      }
      if (void* block = take(bytes)) return {block, block, &Pool::release, c10::Device(c10::kCPU)};
    }
    return previous_->allocate(bytes);
  }

  // `raw_allocate` may have been served by either allocator, so this deleter takes blocks of both.
  c10::DeleterFnPtr raw_deleter() const override {
    return previous_->raw_deleter() == nullptr ? nullptr : &Pool::release;
  }

  void copy_data(void* destination, const void* source, size_t bytes) const override {
    default_copy_data(destination, source, bytes);
  }

  // Gives the pages of all free blocks back to the system; returns how many bytes.
  size_t trim() {
    std::lock_guard<std::mutex> guard(mutex_);
    size_t released = 0;
    for (auto [pages, first] : blocks_[resident]) {
      madvise(address(first), pages * page_bytes, MADV_DONTNEED);
      released += pages * page_bytes;
      insert(vacant, pages, first);
    }
    blocks_[resident].clear();
    free_pages_ = 0;
    return released;
  }

  PoolStatistics statistics() {
    std::lock_guard<std::mutex> guard(mutex_);
    auto bytes = [](size_t pages) { return static_cast<int64_t>(pages * page_bytes); };
    return {bytes(used_pages_), bytes(free_pages_), bytes(high_water_pages_)};
  }

 private:
  // A free block is resident (its pages are mapped in) or vacant (never touched, or trimmed). Only equals are merged.
  enum State : uint32_t { resident = 0, vacant = 1, used = 2 };
  using Block = std::pair<size_t, size_t>;  // pages, first page: ordered by size, then address

  Pool() : previous_(c10::GetCPUAllocator()) {
    reserve();
    pthread_atfork([] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); },
                   [] { instance().mutex_.unlock(); });
    c10::SetCPUAllocator(this, /*priority=*/200);
  }

  // Address space only. Under a memory limit (`ulimit -v`) a smaller range is tried; with none, every request is forwarded.
  void reserve() {
    const size_t physical = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGE_SIZE));
    for (size_t bytes = round_up(4 * physical, huge_page_bytes); bytes >= (size_t{1} << 30); bytes /= 2) {
      void* range = mmap(nullptr, bytes + huge_page_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (range == MAP_FAILED) continue;
      void* tags = mmap(nullptr, bytes / page_bytes * sizeof(uint32_t), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (tags == MAP_FAILED) {
        munmap(range, bytes + huge_page_bytes);
        continue;
      }
      base_ = reinterpret_cast<char*>(round_up(reinterpret_cast<uintptr_t>(range), huge_page_bytes));
      tags_ = static_cast<uint32_t*>(tags);
      total_pages_ = bytes / page_bytes;
      return;
    }
  }

  char* address(size_t page) const { return base_ + page * page_bytes; }

  // The first and the last page of a block carry its state and size: neighbors are found without a search.
  void tag(State state, size_t pages, size_t first) {
    tags_[first] = tags_[first + pages - 1] = (static_cast<uint32_t>(state) << 30) | static_cast<uint32_t>(pages);
  }
  State state_at(size_t page) const { return static_cast<State>(tags_[page] >> 30); }
  size_t pages_at(size_t page) const { return tags_[page] & ((1u << 30) - 1); }

  // Puts a free block into its set, merged with free neighbors of the same state.
  void insert(State state, size_t pages, size_t first) {
    if (first > 0 && state_at(first - 1) == state) {
      const size_t before = pages_at(first - 1);
      first -= before;
      pages += before;
      blocks_[state].erase({before, first});
    }
    const size_t next = first + pages;
    if (next < frontier_ && state_at(next) == state) {
      pages += pages_at(next);
      blocks_[state].erase({pages_at(next), next});
    }
    tag(state, pages, first);
    blocks_[state].insert({pages, first});
  }

  // Takes `pages` from the smallest free block of this state that holds them; false if there is none.
  bool carve(State state, size_t pages, size_t& first) {
    const auto found = blocks_[state].lower_bound({pages, 0});
    if (found == blocks_[state].end()) return false;
    const auto [available, start] = *found;
    blocks_[state].erase(found);
    tag(used, pages, start);  // before the rest is inserted, which looks at its neighbors
    if (available > pages) insert(state, available - pages, start + pages);
    first = start;
    return true;
  }

  // Commits more of the range and lays the new pages down as vacant.
  bool extend(size_t pages) {
    constexpr size_t step = (size_t{32} << 20) / page_bytes;
    const size_t wanted = round_up(pages, step);
    if (total_pages_ - frontier_ < wanted) return false;
    char* start = address(frontier_);
    if (mprotect(start, wanted * page_bytes, PROT_READ | PROT_WRITE) != 0) return false;
    madvise(start, wanted * page_bytes, MADV_HUGEPAGE);
    const size_t first = frontier_;
    frontier_ += wanted;
    insert(vacant, wanted, first);
    return true;
  }

  void* take(size_t bytes) {
    std::lock_guard<std::mutex> guard(mutex_);
    if (bytes > total_pages_ * page_bytes) return nullptr;
    const size_t pages = round_up(bytes, page_bytes) / page_bytes;
    size_t first = 0;
    if (carve(resident, pages, first)) {
      free_pages_ -= pages;
    } else if (!carve(vacant, pages, first) && !(extend(pages) && carve(vacant, pages, first))) {
      return nullptr;
    }
    used_pages_ += pages;
    high_water_pages_ = std::max(high_water_pages_, used_pages_);
    return address(first);
  }

  // True if the memory was offered to the call that runs; that of earlier calls is not to be freed either.
  static bool withdrawn(void* pointer) {
    for (Offer& offer : offers()) {
      if (offer.address != pointer) continue;
      offer.taken = false;
      return true;
    }
    return false;
  }
  static void put_back(void* pointer) { withdrawn(pointer); }

  static void release(void* pointer) {
    if (withdrawn(pointer)) return;  // asked for by `raw_allocate`
    Pool& pool = instance();
    char* block = static_cast<char*>(pointer);
    if (block < pool.base_ || block >= pool.address(pool.total_pages_)) {
      if (pointer != nullptr) pool.previous_->raw_deleter()(pointer);
      return;
    }
    std::lock_guard<std::mutex> guard(pool.mutex_);
    const size_t first = static_cast<size_t>(block - pool.base_) / page_bytes;
    const size_t pages = pool.pages_at(first);
    pool.used_pages_ -= pages;
    pool.free_pages_ += pages;
    pool.insert(resident, pages, first);
  }

  c10::Allocator* previous_;
  std::mutex mutex_;
  std::set<Block> blocks_[2];
  char* base_ = nullptr;
  uint32_t* tags_ = nullptr;
  size_t total_pages_ = 0, frontier_ = 0;
  size_t used_pages_ = 0, free_pages_ = 0, high_water_pages_ = 0;
};

// Opens or closes the pool for the calling thread, and restores what was there.
class Gate {
 public:
  explicit Gate(bool open) : before_(std::exchange(Pool::gate(), open)) {}
  ~Gate() { Pool::gate() = before_; }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;

 private:
  bool before_;
};

}  // namespace daceml
