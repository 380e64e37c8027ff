// SPDX-License-Identifier: Apache-2.0
#include "kernel_copies.hpp"

#include <algorithm>

#include "ranges.hpp"
#include "staged_copies.hpp"

namespace flexkv::cuda {
namespace {

constexpr std::uint32_t kBulkWidth = 16;

// Lean blocks, each with some 8 KiB on their way, that have as much as a plain one of 16 warps.
constexpr std::uint32_t kLeanBlocks = 8;

}  // namespace

KernelCopies::KernelCopies(const Device& device, const TileTable& tiles, std::uint64_t arena)
    : device_(device), tiles_(tiles), arena_(arena) {}

KernelCopies::Shape KernelCopies::plain(std::uint32_t width, std::uint32_t thread_blocks) const {
  return {device_.copy_kernel(width), kCopyThreads, 0, thread_blocks};
}

KernelCopies::Shape KernelCopies::link_bulk(std::uint32_t thread_blocks) const {
  return {device_.bulk_kernel(), kBulkThreads, kBulkSharedBytes, thread_blocks};
}

// Lean blocks of one warp, or as few of the plain kernel as have as much in flight.
KernelCopies::Shape KernelCopies::staged(std::uint32_t width, std::uint32_t thread_blocks) const {
  if (device_.has_bulk_copy() && width == kBulkWidth) {
    return {device_.bulk_kernel(), kLeanThreads, kLeanSharedBytes, thread_blocks};
  }
  return plain(width, (thread_blocks + kLeanBlocks - 1) / kLeanBlocks);
}

void KernelCopies::launch_empty(CUstream stream) const {
  for (const CopyKernelName& kernel : kCopyKernels) {
    launch(CopyBatch{}, plain(kernel.width, 1), stream);
  }
  if (device_.has_bulk_copy()) {
    launch(CopyBatch{}, link_bulk(1), stream);
  }
}

Taken KernelCopies::enqueue(Transfer& transfer, CUstream stream) const {
  const Range range("copy kernel");
  const TileTable::Part part = tiles_.part(transfer.geometry);
  CopyBatch batch =
      batch_of(transfer, std::min<std::uint64_t>(kPlaces, transfer.blocks.size() - transfer.launched));
  batch.tiles = part.tiles;
  batch.n_tiles = part.count;
  batch.arena = arena_;
  batch.stage_bytes = kTileBytes;
  std::uint64_t bits = part.width | arena_;
  for (std::uint32_t i = 0; i < batch.n_places; ++i) {
    batch.places[i].offset = transfer.offsets[transfer.launched + i];
    bits |= batch.places[i].offset;
  }
  const bool bulk = transfer.path == Path::bulk_kernel;
  launch(batch,
         bulk ? link_bulk(transfer.thread_blocks) : plain(width_of(bits), transfer.thread_blocks),
         stream);
  transfer.launched += batch.n_places;
  return {batch.n_places, transfer.launched == transfer.blocks.size()};
}

void KernelCopies::enqueue_staged(const Transfer& transfer, const Segment& segment,
                                  CUdeviceptr memory, CUstream stream) const {
  const Range range(by_direction(transfer.direction, "scatter", "gather"));
  const StagedTiles& tiles = *transfer.staged_tiles;
  CopyBatch batch = batch_of(transfer, segment.blocks);
  batch.tiles = tiles.tiles + segment.first_tile;
  batch.n_tiles = segment.last_tile - segment.first_tile;
  batch.arena = memory - tiles.starts[segment.first_tile];
  batch.stage_bytes = kStagedTileBytes;
  for (std::uint32_t i = 0; i < batch.n_places; ++i) {
    batch.places[i].offset = i * segment.stride;
  }
  launch(batch, staged(tiles.width, transfer.thread_blocks), stream);
}

// Without the tiles, and without the side that is not pages.
CopyBatch KernelCopies::batch_of(const Transfer& transfer, std::uint64_t blocks) {
  CopyBatch batch;
  batch.n_places = static_cast<std::uint32_t>(blocks);
  batch.load = transfer.direction == Direction::load ? 1 : 0;
  for (std::uint32_t i = 0; i < batch.n_places; ++i) {
    batch.places[i].block = transfer.blocks[transfer.launched + i];
  }
  return batch;
}

void KernelCopies::launch(const CopyBatch& batch, const Shape& shape, CUstream stream) const {
  const std::uint32_t needed = item_count(batch) / (shape.threads / kWarpThreads) + 1;
  void* parameters[] = {const_cast<CopyBatch*>(&batch)};
  const Driver& driver = device_.driver();
  driver.check(driver.cuLaunchKernel(shape.kernel, std::min(needed, shape.thread_blocks), 1, 1,
                                     shape.threads, 1, 1, shape.shared_bytes, stream, parameters,
                                     nullptr),
               "cuLaunchKernel");
}

}  // namespace flexkv::cuda
