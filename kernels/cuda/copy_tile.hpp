// SPDX-License-Identifier: Apache-2.0
//
// The body of the copy kernel, as one lane of one warp runs it.
#pragma once

#include <cstdint>

#include "tiles.hpp"

namespace flexkv::cuda {

// Loads of one lane in flight before the first store: with 16 byte units 4 KiB a warp.
constexpr std::uint32_t kInFlight = 8;

// The bytes are read once and written once. These accesses ask the caches to drop them first, which
// changes nothing about what is read: unlike ld.global.nc they may follow writes by the host.
template <typename Unit>
FKV_HOST_DEVICE inline Unit read_once(std::uint64_t address) {
#if defined(__CUDA_ARCH__)
  return __ldcs(reinterpret_cast<const Unit*>(address));
#else
  return *reinterpret_cast<const Unit*>(address);
#endif
}

template <typename Unit>
FKV_HOST_DEVICE inline void write_once(std::uint64_t address, Unit value) {
#if defined(__CUDA_ARCH__)
  __stcs(reinterpret_cast<Unit*>(address), value);
#else
  *reinterpret_cast<Unit*>(address) = value;
#endif
}

// Every row of the tile is a multiple of Unit long, and all its addresses are multiples of it. The
// direction is known to the compiler: with both in one body, values would not fit the registers.
template <typename Unit, bool load>
FKV_HOST_DEVICE inline void copy_tile(const Item& item, std::uint32_t lane) {
  constexpr std::uint32_t width = sizeof(Unit);
  const std::uint32_t units = item.tile.rows * (item.tile.row_bytes / width);
  LaneUnits place(item.tile, width, lane);
  for (std::uint32_t first = lane; first < units; first += kInFlight * kWarpThreads) {
    // The addresses among the pages are worked out twice: kept, they would cost two registers a unit,
    // and a multiprocessor would hold one thread block instead of two.
    const std::uint32_t left = units - first;
    const std::uint64_t flat = item.arena + std::uint64_t{first} * width;
    LaneUnits reading = place;
    Unit values[kInFlight];
    FKV_UNROLL
    for (std::uint32_t i = 0; i < kInFlight; ++i) {
      if (i * kWarpThreads < left) {
        values[i] = read_once<Unit>(load ? flat + i * kWarpThreads * width
                                         : item.page + reading.page_offset());
      }
      reading.next();
    }
    FKV_UNROLL
    for (std::uint32_t i = 0; i < kInFlight; ++i) {
      if (i * kWarpThreads < left) {
        write_once<Unit>(load ? item.page + place.page_offset()
                              : flat + i * kWarpThreads * width,
                         values[i]);
      }
      place.next();
    }
  }
}

// The share of warp number `warp` of `warps` in a batch.
template <typename Unit, bool load>
FKV_HOST_DEVICE inline void copy_items(const CopyBatch& batch, std::uint32_t warp,
                                       std::uint32_t warps, std::uint32_t lane) {
  const std::uint32_t count = item_count(batch);
  // count - number cannot overflow, number + warps could.
  for (std::uint32_t number = warp; number < count;) {
    copy_tile<Unit, load>(item_at(batch, number), lane);
    if (count - number <= warps) {
      break;
    }
    number += warps;
  }
}

// One thread of the kernel.
template <typename Unit>
FKV_HOST_DEVICE inline void copy_kernel(const CopyBatch& batch, const ThreadPlace& place) {
  const std::uint32_t thread = place.block * place.threads + place.thread;
  const std::uint32_t warp = thread / kWarpThreads;
  const std::uint32_t warps = place.blocks * place.threads / kWarpThreads;
  const std::uint32_t lane = thread % kWarpThreads;
  if (batch.load != 0) {
    copy_items<Unit, true>(batch, warp, warps, lane);
  } else {
    copy_items<Unit, false>(batch, warp, warps, lane);
  }
}

}  // namespace flexkv::cuda
