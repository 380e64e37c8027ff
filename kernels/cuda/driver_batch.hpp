// SPDX-License-Identifier: Apache-2.0
//
// Copies that the driver is given with one call.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "driver.hpp"

namespace flexkv::cuda {

// Of one thread. A device must be current.
class DriverBatch {
 public:
  explicit DriverBatch(const Driver& driver) : driver_(driver) {}

  // Copies of a call. It takes some 0.5 us for each and keeps the driver's lock meanwhile, which the
  // engine's launches need too. Not tuned yet.
  static constexpr std::size_t kCopies = 256;

  bool full() const noexcept { return count_ == kCopies; }
  std::uint32_t count() const noexcept { return static_cast<std::uint32_t>(count_); }

  // Not when full.
  void add(CUdeviceptr destination, CUdeviceptr source, std::size_t bytes) noexcept;

  // Gives all to the driver and forgets them. Throws DriverError; some may have been enqueued then.
  void enqueue(CUstream stream);

 private:
  void call(std::size_t count, CUstream stream);

  const Driver& driver_;
  std::size_t count_ = 0;
  std::array<CUdeviceptr, kCopies> destinations_;
  std::array<CUdeviceptr, kCopies> sources_;
  std::array<std::size_t, kCopies> sizes_;
};

}  // namespace flexkv::cuda
