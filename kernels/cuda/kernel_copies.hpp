// SPDX-License-Identifier: Apache-2.0
//
// Copies by a kernel on a few multiprocessors, for pages that fall into short runs.
#pragma once

#include <cstdint>

#include "device.hpp"
#include "tile_table.hpp"
#include "tiles.hpp"
#include "transfer.hpp"

namespace flexkv::cuda {

// Of one thread. A device must be current.
class KernelCopies {
 public:
  // `arena` is its address as the device sees it; `thread_blocks` the most of one launch.
  KernelCopies(const Device& device, const TileTable& tiles, std::uint64_t arena,
               std::uint32_t thread_blocks);

  // Launches every kernel this mover may use, with nothing to do. Throws DriverError.
  void launch_empty(CUstream stream) const;

  // Enqueues the next blocks of the transfer, up to a full slice. Blocks whose addresses do not fit
  // bulk copies go by the other kernel. Throws DriverError; then nothing was enqueued.
  Taken enqueue(Transfer& transfer, CUstream stream) const;

 private:
  void launch(const CopyBatch& batch, std::uint32_t width, bool bulk, CUstream stream) const;

  const Device& device_;
  const TileTable& tiles_;
  const std::uint64_t arena_;
  const std::uint32_t thread_blocks_;
};

}  // namespace flexkv::cuda
