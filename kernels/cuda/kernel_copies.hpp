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
  // `arena` is its address as the device sees it.
  KernelCopies(const Device& device, const TileTable& tiles, std::uint64_t arena);

  // Launches every kernel this mover may use, with nothing to do. Throws DriverError.
  void launch_empty(CUstream stream) const;

  // Enqueues the next blocks of the transfer, up to a full slice. Throws DriverError; then nothing was
  // enqueued.
  Taken enqueue(Transfer& transfer, CUstream stream) const;

  // The same for the next `blocks` blocks between pages and a segment of a ring instead of the arena;
  // the transfer stands where it stood.
  void enqueue_staged(const Transfer& transfer, std::uint64_t blocks, CUdeviceptr segment,
                      CUstream stream) const;

 private:
  // What `launch` needs beside a batch.
  struct Shape {
    std::uint32_t width;
    bool bulk;
    std::uint32_t thread_blocks;
  };

  CopyBatch batch_of(const Transfer& transfer, const TileTable::Part& part,
                     std::uint64_t blocks) const;
  void launch(const CopyBatch& batch, const Shape& shape, CUstream stream) const;

  const Device& device_;
  const TileTable& tiles_;
  const std::uint64_t arena_;
};

}  // namespace flexkv::cuda
