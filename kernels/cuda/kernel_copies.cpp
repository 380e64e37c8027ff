// SPDX-License-Identifier: Apache-2.0
#include "kernel_copies.hpp"

#include <algorithm>

namespace flexkv::cuda {

KernelCopies::KernelCopies(const Device& device, const TileTable& tiles, std::uint64_t arena,
                           std::uint32_t thread_blocks)
    : device_(device), tiles_(tiles), arena_(arena), thread_blocks_(thread_blocks) {}

void KernelCopies::launch_empty(CUstream stream) const {
  for (const CopyKernelName& kernel : kCopyKernels) {
    launch(CopyBatch{}, kernel.width, false, stream);
  }
  if (device_.has_bulk_copy()) {
    launch(CopyBatch{}, 16, true, stream);
  }
}

Taken KernelCopies::enqueue(Transfer& transfer, CUstream stream) const {
  const TileTable::Part part = tiles_.part(transfer.geometry);
  CopyBatch batch;
  batch.tiles = part.tiles;
  batch.arena = arena_;
  batch.n_tiles = part.count;
  batch.n_places = static_cast<std::uint32_t>(
      std::min<std::uint64_t>(kPlaces, transfer.blocks.size() - transfer.launched));
  batch.load = transfer.direction == Direction::load ? 1 : 0;
  batch.reserved = 0;
  std::uint64_t bits = part.width;
  for (std::uint32_t i = 0; i < batch.n_places; ++i) {
    const std::uint64_t index = transfer.launched + i;
    batch.places[i] = {transfer.blocks[index], transfer.offsets[index]};
    bits |= transfer.offsets[index];
  }
  const auto width = static_cast<std::uint32_t>(bits & (~bits + 1));  // the lowest bit set
  launch(batch, width, transfer.path == Path::bulk_kernel && width == 16, stream);
  transfer.launched += batch.n_places;
  return {batch.n_places, transfer.launched == transfer.blocks.size()};
}

void KernelCopies::launch(const CopyBatch& batch, std::uint32_t width, bool bulk,
                          CUstream stream) const {
  const std::uint32_t warps = bulk ? kBulkWarps : kCopyThreads / kWarpThreads;
  const std::uint32_t needed = item_count(batch) / warps + 1;
  void* parameters[] = {const_cast<CopyBatch*>(&batch)};
  const Driver& driver = device_.driver();
  driver.check(driver.cuLaunchKernel(bulk ? device_.bulk_kernel() : device_.copy_kernel(width),
                                     std::min(needed, thread_blocks_), 1, 1,
                                     warps * kWarpThreads, 1, 1, bulk ? kBulkSharedBytes : 0,
                                     stream, parameters, nullptr),
               "cuLaunchKernel");
}

}  // namespace flexkv::cuda
