// SPDX-License-Identifier: Apache-2.0
//
// The copy kernel over the bulk copy engine (TMA, sm_90 and newer): tiles travel through shared
// memory without passing a register. Each warp works alone on a ring of kBulkStages tiles:
//
//   iteration i:  start reading item i      into stage i % kBulkStages
//                 start writing item i - 2  once its bytes have arrived
//
// so that two tiles are being read and up to two written at any time. PTX ISA, chapters "Data
// movement: cp.async.bulk" and "mbarrier", says what each instruction does.
#pragma once

#include <cstdint>

#include "kernel_names.hpp"
#include "tiles.hpp"

namespace flexkv::cuda {

#if __CUDA_ARCH__ >= 900

// Items between the start of a read and the start of its write.
constexpr std::uint32_t kBulkLag = 2;

__device__ inline void barrier_init(std::uint32_t barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}

// Arrives, and lets the phase end only when `bytes` more bytes have come.
__device__ inline void barrier_expect(std::uint32_t barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Waits for the end of the phase of that parity; what the bulk reads wrote is visible afterwards.
__device__ inline void barrier_wait(std::uint32_t barrier, std::uint32_t parity) {
  std::uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{\n"
        ".reg .pred ended;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 ended, [%1], %2;\n"
        "selp.u32 %0, 1, 0, ended;\n"
        "}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  }
}

// Starts a copy to shared memory. Addresses and bytes are multiples of 16.
__device__ inline void bulk_read(std::uint32_t staging, std::uint64_t source, std::uint32_t bytes,
                                 std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          staging),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

// Starts a copy from shared memory, as a part of this thread's current group.
__device__ inline void bulk_write(std::uint64_t destination, std::uint32_t staging,
                                  std::uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(destination),
               "r"(staging), "r"(bytes)
               : "memory");
}

__device__ inline void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until at most `Pending` of this thread's groups still read shared memory.
template <std::uint32_t Pending>
__device__ inline void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Pending) : "memory");
}

// Waits until this thread's groups have written all their bytes.
__device__ inline void bulk_wait_written() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

__device__ inline std::uint32_t tile_bytes(const Tile& tile) { return tile.rows * tile.row_bytes; }

// The arena's side of a tile is contiguous: one copy. The pages' side is one copy a row, spread over
// the lanes.
__device__ inline void read_item(const Item& item, bool load, std::uint32_t lane,
                                 std::uint32_t staging, std::uint32_t barrier) {
  if (lane == 0) {
    barrier_expect(barrier, tile_bytes(item.tile));
    if (load) {
      bulk_read(staging, item.arena, tile_bytes(item.tile), barrier);
    }
  }
  __syncwarp();
  if (!load) {
    for (std::uint32_t row = lane; row < item.tile.rows; row += kWarpThreads) {
      bulk_read(staging + row * item.tile.row_bytes, item.page + row * item.tile.row_stride,
                item.tile.row_bytes, barrier);
    }
  }
}

__device__ inline void write_item(const Item& item, bool load, std::uint32_t lane,
                                  std::uint32_t staging) {
  if (load) {
    for (std::uint32_t row = lane; row < item.tile.rows; row += kWarpThreads) {
      bulk_write(item.page + row * item.tile.row_stride, staging + row * item.tile.row_bytes,
                 item.tile.row_bytes);
    }
  } else if (lane == 0) {
    bulk_write(item.arena, staging, tile_bytes(item.tile));
  }
  // Every lane commits, so that all count the same groups.
  bulk_commit();
}

__device__ inline void bulk_copy_items(const CopyBatch& batch, std::uint32_t warp,
                                       std::uint32_t warps, std::uint32_t lane,
                                       std::uint32_t staging, std::uint32_t barriers) {
  const std::uint32_t items = item_count(batch);
  const std::uint32_t mine = items > warp ? (items - warp - 1) / warps + 1 : 0;
  const bool load = batch.load != 0;
  for (std::uint32_t i = 0; i < mine + kBulkLag; ++i) {
    if (i < mine) {
      // The stage was last written out in iteration i - kBulkStages + kBulkLag; groups committed
      // after that one may still be reading their own stages.
      bulk_wait_read<kBulkStages - kBulkLag - 1>();
      __syncwarp();
      const std::uint32_t stage = i % kBulkStages;
      read_item(item_at(batch, warp + i * warps), load, lane, staging + stage * kTileBytes,
                barriers + stage * 8);
    }
    if (i >= kBulkLag) {
      const std::uint32_t old = i - kBulkLag;
      const std::uint32_t stage = old % kBulkStages;
      barrier_wait(barriers + stage * 8, (old / kBulkStages) & 1);
      write_item(item_at(batch, warp + old * warps), load, lane, staging + stage * kTileBytes);
    }
  }
  bulk_wait_written();
}

#endif

}  // namespace flexkv::cuda
