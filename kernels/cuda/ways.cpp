// SPDX-License-Identifier: Apache-2.0
#include "ways.hpp"

#include "driver_copies.hpp"
#include "tile_table.hpp"

namespace flexkv::cuda {

void Ways::choose(Transfer& transfer) {
  transfer.slot_runs = &slot_runs_.of(transfer.geometry);
  const Way way = tuning_.choose(transfer.direction, DriverCopies::mean_run(transfer),
                                 mean_slot_run(*transfer.slot_runs, transfer.offsets));
  transfer.path = possible(way.path, transfer);
  transfer.thread_blocks = way.thread_blocks;
  counts_.add(*transfer.path, transfer.path == way.path,
              transfer.geometry.block_bytes * transfer.blocks.size());
}

// The same, or a plain kernel, which copies anything.
Path Ways::possible(Path path, Transfer& transfer) const {
  if (path == Path::staged && staged_ != nullptr) {
    transfer.staged_tiles = staged_->tiles(transfer);
  }
  const bool no_ring = path == Path::staged && transfer.staged_tiles == nullptr;
  const bool no_bulk = path == Path::bulk_kernel && !takes_bulk(transfer);
  return no_ring || no_bulk ? Path::kernel : path;
}

// Bulk copies take addresses and lengths that are multiples of 16.
bool Ways::takes_bulk(const Transfer& transfer) const noexcept {
  std::uint64_t bits = arena_ | common_width(transfer.geometry);
  for (const std::uint64_t offset : transfer.offsets) {
    bits |= offset;
  }
  return device_.has_bulk_copy() && bits % 16 == 0;
}

}  // namespace flexkv::cuda
