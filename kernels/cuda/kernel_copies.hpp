// SPDX-License-Identifier: Apache-2.0
//
// Copies by a kernel on a few multiprocessors, for pages that fall into short runs.
#pragma once

#include <cstdint>

#include "device.hpp"
#include "staged_tiles.hpp"
#include "tile_table.hpp"
#include "tiles.hpp"
#include "transfer.hpp"

namespace flexkv::cuda {

struct Segment;

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

  // The same for the next segment of the transfer, between pages and its place in the ring, `memory`;
  // the transfer stands where it stood.
  void enqueue_staged(const Transfer& transfer, const Segment& segment, CUdeviceptr memory,
                      CUstream stream) const;

 private:
  // What `launch` needs beside a batch.
  struct Shape {
    CUfunction kernel;
    std::uint32_t threads;
    std::uint32_t shared_bytes;
    std::uint32_t thread_blocks;  // at most
  };

  Shape plain(std::uint32_t width, std::uint32_t thread_blocks) const;
  Shape link_bulk(std::uint32_t thread_blocks) const;
  Shape staged(std::uint32_t width, std::uint32_t thread_blocks) const;
  static CopyBatch batch_of(const Transfer& transfer, std::uint64_t blocks);
  void launch(const CopyBatch& batch, const Shape& shape, CUstream stream) const;

  const Device& device_;
  const TileTable& tiles_;
  const std::uint64_t arena_;
};

}  // namespace flexkv::cuda
