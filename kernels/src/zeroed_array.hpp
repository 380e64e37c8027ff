// SPDX-License-Identifier: Apache-2.0
//
// An array of fixed size whose memory the system gives when it is first used, or when `fault_in` asks.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstring>
#include <limits>
#include <new>
#include <type_traits>

namespace flexkv {

// All bytes are zero at first, which has to be a value of `T`.
template <typename T>
class ZeroedArray {
  static_assert(std::is_trivially_copyable_v<T> && std::is_trivially_destructible_v<T>);

 public:
  // Throws std::bad_alloc.
  explicit ZeroedArray(std::size_t size) : size_(size) {
    if (size == 0) {
      return;
    }
    if (size > std::numeric_limits<std::size_t>::max() / sizeof(T)) {
      throw std::bad_alloc();
    }
    void* const memory = mmap(nullptr, size * sizeof(T), PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
      throw std::bad_alloc();
    }
    // Reads are at random places: large pages need fewer walks of the page table. A refusal costs
    // speed only.
    madvise(memory, size * sizeof(T), MADV_HUGEPAGE);
    items_ = static_cast<T*>(memory);
  }
  ~ZeroedArray() {
    if (items_ != nullptr) {
      munmap(items_, size_ * sizeof(T));
    }
  }
  ZeroedArray(const ZeroedArray&) = delete;
  ZeroedArray& operator=(const ZeroedArray&) = delete;

  // Has the system give all memory now, before anybody waits for it.
  void fault_in() noexcept {
    if (items_ != nullptr) {
      std::memset(static_cast<void*>(items_), 0, size_ * sizeof(T));
    }
  }

  std::size_t size() const noexcept { return size_; }
  T& operator[](std::size_t i) noexcept { return items_[i]; }
  const T& operator[](std::size_t i) const noexcept { return items_[i]; }

 private:
  T* items_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace flexkv
