// SPDX-License-Identifier: Apache-2.0
#include "kernel_copies.hpp"

#include <algorithm>

#include "ranges.hpp"
#include "slot_runs.hpp"

namespace flexkv::cuda {

KernelCopies::KernelCopies(const Device& device, const TileTable& tiles, std::uint64_t arena)
    : device_(device), tiles_(tiles), arena_(arena) {}

void KernelCopies::launch_empty(CUstream stream) const {
  for (const CopyKernelName& kernel : kCopyKernels) {
    launch(CopyBatch{}, {kernel.width, false, 1}, stream);
  }
  if (device_.has_bulk_copy()) {
    launch(CopyBatch{}, {16, true, 1}, stream);
  }
}

Taken KernelCopies::enqueue(Transfer& transfer, CUstream stream) const {
  const Range range("copy kernel");
  const TileTable::Part part = tiles_.part(transfer.geometry);
  CopyBatch batch = batch_of(
      transfer, part,
      std::min<std::uint64_t>(kPlaces, transfer.blocks.size() - transfer.launched));
  batch.arena = arena_;
  std::uint64_t bits = part.width | arena_;
  for (std::uint32_t i = 0; i < batch.n_places; ++i) {
    batch.places[i].offset = transfer.offsets[transfer.launched + i];
    bits |= batch.places[i].offset;
  }
  const auto width = static_cast<std::uint32_t>(bits & (~bits + 1));  // the lowest bit set
  launch(batch, {width, transfer.path == Path::bulk_kernel, transfer.thread_blocks}, stream);
  transfer.launched += batch.n_places;
  return {batch.n_places, transfer.launched == transfer.blocks.size()};
}

void KernelCopies::enqueue_staged(const Transfer& transfer, std::uint64_t blocks,
                                  CUdeviceptr segment, CUstream stream) const {
  const Range range(by_direction(transfer.direction, "scatter", "gather"));
  const TileTable::Part part = tiles_.part(transfer.geometry);
  CopyBatch batch = batch_of(transfer, part, blocks);
  batch.arena = segment - transfer.slot_runs->begin;
  for (std::uint32_t i = 0; i < batch.n_places; ++i) {
    batch.places[i].offset = i * transfer.slot_runs->stride;
  }
  launch(batch, {part.width, false, transfer.thread_blocks}, stream);
}

// Without the side that is not pages.
CopyBatch KernelCopies::batch_of(const Transfer& transfer, const TileTable::Part& part,
                                 std::uint64_t blocks) const {
  CopyBatch batch;
  batch.tiles = part.tiles;
  batch.n_tiles = part.count;
  batch.n_places = static_cast<std::uint32_t>(blocks);
  batch.load = transfer.direction == Direction::load ? 1 : 0;
  batch.reserved = 0;
  for (std::uint32_t i = 0; i < batch.n_places; ++i) {
    batch.places[i].block = transfer.blocks[transfer.launched + i];
  }
  return batch;
}

void KernelCopies::launch(const CopyBatch& batch, const Shape& shape, CUstream stream) const {
  const std::uint32_t warps = shape.bulk ? kBulkWarps : kCopyThreads / kWarpThreads;
  const std::uint32_t needed = item_count(batch) / warps + 1;
  void* parameters[] = {const_cast<CopyBatch*>(&batch)};
  const Driver& driver = device_.driver();
  driver.check(
      driver.cuLaunchKernel(
          shape.bulk ? device_.bulk_kernel() : device_.copy_kernel(shape.width),
          std::min(needed, shape.thread_blocks), 1, 1, warps * kWarpThreads, 1, 1,
          shape.bulk ? kBulkSharedBytes : 0, stream, parameters, nullptr),
      "cuLaunchKernel");
}

}  // namespace flexkv::cuda
