// SPDX-License-Identifier: Apache-2.0
//
// Copies by the device's copy engines: one descriptor for each run.
#pragma once

#include <cstdint>

#include "driver.hpp"
#include "driver_batch.hpp"
#include "layout.hpp"
#include "transfer.hpp"

namespace flexkv::cuda {

// Of one thread. A device must be current.
class DriverCopies {
 public:
  DriverCopies(const Driver& driver, const Layout& layout, const HostRange& range);

  // The mean bytes of the first runs of a transfer, as far as one looks to tell long from short.
  static std::uint64_t mean_run(const Transfer& transfer);

  // Enqueues the next runs of the transfer, up to a full slice. Throws DriverError; some of the slice
  // may have been enqueued then.
  Taken enqueue(Transfer& transfer, CUstream stream);

 private:
  static RunCursor cursor(const Transfer& transfer);
  bool next_piece(Transfer& transfer, Run& piece) const;

  DriverBatch batch_;
  const HostRange& range_;
  const std::uint64_t arena_;  // address of the arena in this process
};

}  // namespace flexkv::cuda
