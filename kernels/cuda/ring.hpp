// SPDX-License-Identifier: Apache-2.0
//
// Device memory between the arena and the pages, used again and again in the order of a lane's slices.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "driver.hpp"

namespace flexkv::cuda {

// Positions count all bytes that were ever taken, with what was left out at the end of the memory because
// a piece would not have fitted. A device must be current when one is made or destroyed.
class Ring {
 public:
  // Pieces begin at multiples of this: a line of the device's second-level cache, twice.
  static constexpr std::uint64_t kAlign = 256;

  // Throws DriverError.
  Ring(const Driver& driver, std::uint64_t bytes) : driver_(driver), size_(bytes / kAlign * kAlign) {
    driver_.check(driver_.cuMemAlloc(&memory_, size_),
                  "cuMemAlloc of " + std::to_string(size_) +
                      " bytes for a ring between the arena and the pages");
  }
  ~Ring() { driver_.cuMemFree(memory_); }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  std::uint64_t bytes() const noexcept { return size_; }

  // Uses the first bytes alone from now on, at most those that it was made with. Only when all that was
  // taken is drained.
  void use(std::uint64_t bytes) noexcept {
    size_ = bytes / kAlign * kAlign;
    freed_ = taken_;
  }

  // Whether there is room for a piece; of up to half of the ring there is at the latest when all is free.
  bool fits(std::uint64_t bytes) const noexcept {
    return taken_ + skipped(bytes) + rounded(bytes) - freed_ <= size_;
  }

  // The address of a piece that fits.
  CUdeviceptr take(std::uint64_t bytes) noexcept {
    taken_ += skipped(bytes);
    const CUdeviceptr piece = memory_ + taken_ % size_;
    taken_ += rounded(bytes);
    return piece;
  }

  std::uint64_t taken() const noexcept { return taken_; }

  // Whatever was taken up to this position is free.
  void free_to(std::uint64_t position) noexcept { freed_ = std::max(freed_, position); }

 private:
  static std::uint64_t rounded(std::uint64_t bytes) noexcept {
    return (bytes + kAlign - 1) / kAlign * kAlign;
  }

  // What is left of the memory's end, if the piece does not fit there.
  std::uint64_t skipped(std::uint64_t bytes) const noexcept {
    const std::uint64_t left = size_ - taken_ % size_;
    return left < rounded(bytes) ? left : 0;
  }

  const Driver& driver_;
  std::uint64_t size_;
  CUdeviceptr memory_ = 0;
  std::uint64_t taken_ = 0;
  std::uint64_t freed_ = 0;
};

}  // namespace flexkv::cuda
