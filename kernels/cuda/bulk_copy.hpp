// SPDX-License-Identifier: Apache-2.0
//
// The copy kernel over the bulk copy engine (TMA, sm_90 and newer): tiles travel through shared
// memory without passing a register. Each warp works alone on a ring of kBulkStages tiles:
//
//   iteration i:  start reading item i      into stage i % kBulkStages
//                 start writing item i - 2  once its bytes have arrived
//
// so that two tiles are being read and up to two written at any time. `Ops` are the instructions: of
// bulk_ptx.cuh on a device, of an emulation in tests.
#pragma once

#include <cstdint>

#include "copy_tile.hpp"
#include "kernel_names.hpp"
#include "tiles.hpp"

namespace flexkv::cuda {

// Items between the start of a read and the start of its write.
constexpr std::uint32_t kBulkLag = 2;

FKV_HOST_DEVICE inline std::uint32_t tile_bytes(const Tile& tile) { return tile.rows * tile.row_bytes; }

// The arena's side of a tile is contiguous: one copy. The pages' side is one copy a row, spread over
// the lanes.
template <typename Ops>
FKV_HOST_DEVICE inline void read_item(Ops& ops, const Item& item, bool load, std::uint32_t lane,
                                      std::uint32_t staging, std::uint32_t barrier) {
  if (lane == 0) {
    ops.barrier_expect(barrier, tile_bytes(item.tile));
    if (load) {
      ops.bulk_read(staging, item.arena, tile_bytes(item.tile), barrier);
    }
  }
  ops.sync_warp();
  if (!load) {
    for (std::uint32_t row = lane; row < item.tile.rows; row += kWarpThreads) {
      ops.bulk_read(staging + row * item.tile.row_bytes, item.page + row * item.tile.row_stride,
                item.tile.row_bytes, barrier);
    }
  }
}

template <typename Ops>
FKV_HOST_DEVICE inline void write_item(Ops& ops, const Item& item, bool load, std::uint32_t lane,
                                       std::uint32_t staging) {
  if (load) {
    for (std::uint32_t row = lane; row < item.tile.rows; row += kWarpThreads) {
      ops.bulk_write(item.page + row * item.tile.row_stride, staging + row * item.tile.row_bytes,
                 item.tile.row_bytes);
    }
  } else if (lane == 0) {
    ops.bulk_write(item.arena, staging, tile_bytes(item.tile));
  }
  // Every lane commits, so that all count the same groups.
  ops.bulk_commit();
}

// The share of warp number `warp` of `warps` in a batch, with its part of the shared memory.
template <typename Ops>
FKV_HOST_DEVICE inline void bulk_copy_items(Ops& ops, const CopyBatch& batch, std::uint32_t warp,
                                            std::uint32_t warps, std::uint32_t lane,
                                            std::uint32_t staging, std::uint32_t barriers) {
  const std::uint32_t items = item_count(batch);
  const std::uint32_t mine = items > warp ? (items - warp - 1) / warps + 1 : 0;
  const bool load = batch.load != 0;
  for (std::uint32_t i = 0; i < mine + kBulkLag; ++i) {
    if (i < mine) {
      // The stage was last written out in iteration i - kBulkStages + kBulkLag; groups committed
      // after that one may still be reading their own stages.
      ops.template bulk_wait_read<kBulkStages - kBulkLag - 1>();
      ops.sync_warp();
      const std::uint32_t stage = i % kBulkStages;
      read_item(ops, item_at(batch, warp + i * warps), load, lane, staging + stage * batch.stage_bytes,
                barriers + stage * kBarrierBytes);
    }
    if (i >= kBulkLag) {
      const std::uint32_t old = i - kBulkLag;
      const std::uint32_t stage = old % kBulkStages;
      ops.barrier_wait(barriers + stage * kBarrierBytes, (old / kBulkStages) & 1);
      write_item(ops, item_at(batch, warp + old * warps), load, lane,
                 staging + stage * batch.stage_bytes);
    }
  }
  ops.bulk_wait_written();
}

// One thread of the kernel, of at most kBulkWarps warps. `ops.staging` and `ops.barriers` are addresses
// in shared memory: of kBulkStages * stage_bytes for each warp, and of kBulkBarriers barriers.
template <typename Ops>
FKV_HOST_DEVICE inline void bulk_kernel(Ops& ops, const CopyBatch& batch, const ThreadPlace& place) {
  const std::uint32_t warp = place.thread / kWarpThreads;
  const std::uint32_t warps = place.threads / kWarpThreads;
  const std::uint32_t lane = place.thread % kWarpThreads;
  const std::uint32_t barriers = ops.barriers + warp * kBulkStages * kBarrierBytes;
  if (lane < kBulkStages) {
    ops.barrier_init(barriers + lane * kBarrierBytes);
    ops.fence_barriers();  // bulk copies must see the barriers initialised
  }
  ops.sync_warp();
  bulk_copy_items(ops, batch, place.block * warps + warp, place.blocks * warps, lane,
                  ops.staging + warp * kBulkStages * batch.stage_bytes, barriers);
}

}  // namespace flexkv::cuda
