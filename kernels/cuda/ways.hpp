// SPDX-License-Identifier: Apache-2.0
//
// The way that each transfer goes, and how many bytes went which way.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "cuda_tuning.hpp"
#include "device.hpp"
#include "slot_runs.hpp"
#include "staged_copies.hpp"
#include "transfer.hpp"

namespace flexkv::cuda {

// See fkv_mover_path_bytes. Thread-safe.
class WayCounts {
 public:
  void add(Path path, bool as_chosen, std::uint64_t bytes) noexcept {
    bytes_[1 + static_cast<std::size_t>(path)] += bytes;
    bytes_[0] += as_chosen ? 0 : bytes;
  }

  std::array<std::uint64_t, 1 + kPaths> read() const noexcept {
    std::array<std::uint64_t, 1 + kPaths> result{};
    for (std::size_t i = 0; i < result.size(); ++i) {
      result[i] = bytes_[i];
    }
    return result;
  }

 private:
  std::array<std::atomic<std::uint64_t>, 1 + kPaths> bytes_{};
};

// Of one thread.
class Ways {
 public:
  // `staged`: nullptr if there is no ring. `arena`: its address as the device sees it.
  Ways(const CudaTuning& tuning, const Device& device, StagedCopies* staged,
       std::uint64_t arena, WayCounts& counts)
      : tuning_(tuning), device_(device), staged_(staged), arena_(arena), counts_(counts) {}

  // Sets the transfer's path and what goes with it. Throws DriverError, std::bad_alloc.
  void choose(Transfer& transfer);

 private:
  Path possible(Path path, Transfer& transfer) const;
  bool takes_bulk(const Transfer& transfer) const noexcept;

  const CudaTuning& tuning_;
  const Device& device_;
  StagedCopies* staged_;
  const std::uint64_t arena_;
  WayCounts& counts_;
  SlotRunTable slot_runs_;
};

}  // namespace flexkv::cuda
