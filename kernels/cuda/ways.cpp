// SPDX-License-Identifier: Apache-2.0
#include "ways.hpp"

#include "driver_copies.hpp"

namespace flexkv::cuda {

void Ways::choose(Transfer& transfer) {
  transfer.slot_runs = &slot_runs_.of(transfer.geometry);
  const Way way = tuning_.choose(transfer.direction, DriverCopies::mean_run(transfer),
                                 mean_slot_run(*transfer.slot_runs, transfer.offsets));
  transfer.path = possible(way.path, *transfer.slot_runs);
  transfer.thread_blocks = way.thread_blocks;
  counts_.add(*transfer.path, transfer.path == way.path,
              transfer.geometry.block_bytes * transfer.blocks.size());
}

// The same, or a plain kernel, which copies anything.
Path Ways::possible(Path path, const SlotRuns& runs) const noexcept {
  const bool no_ring = path == Path::staged && (staged_ == nullptr || !staged_->takes(runs));
  const bool no_bulk = path == Path::bulk_kernel && !device_.has_bulk_copy();
  return no_ring || no_bulk ? Path::kernel : path;
}

}  // namespace flexkv::cuda
