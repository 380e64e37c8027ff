// SPDX-License-Identifier: Apache-2.0
//
// The copy kernels as the fake device runs them: the plain ones by the code that the real device
// runs, for each thread; the bulk kernel by the same address arithmetic, since its instructions exist
// on a device only.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "copy_tile.hpp"
#include "kernel_names.hpp"
#include "tiles.hpp"

namespace fake {

using flexkv::cuda::CopyBatch;
using flexkv::cuda::Item;

struct alignas(16) Unit16 {
  std::uint64_t low, high;
};

// A device faults on addresses that are no multiples of the access.
inline bool fits(const Item& item, std::uint64_t width) {
  std::uint64_t bits = item.page | item.arena | item.tile.row_bytes;
  bits |= item.tile.rows > 1 ? item.tile.row_stride : 0;
  return bits % width == 0;
}

template <typename Unit>
CUresult run_copy(const CopyBatch& batch, std::uint32_t warps) {
  for (std::uint32_t i = 0; i < flexkv::cuda::item_count(batch); ++i) {
    if (!fits(flexkv::cuda::item_at(batch, i), sizeof(Unit))) {
      return CUDA_ERROR_MISALIGNED_ADDRESS;
    }
  }
  for (std::uint32_t thread = 0; thread < warps * flexkv::cuda::kWarpThreads; ++thread) {
    flexkv::cuda::copy_items<Unit>(batch, thread / flexkv::cuda::kWarpThreads, warps,
                                   thread % flexkv::cuda::kWarpThreads);
  }
  return CUDA_SUCCESS;
}

inline CUresult run_bulk(const CopyBatch& batch) {
  std::vector<char> staging(flexkv::cuda::kTileBytes);
  for (std::uint32_t i = 0; i < flexkv::cuda::item_count(batch); ++i) {
    const Item item = flexkv::cuda::item_at(batch, i);
    const std::size_t bytes = std::size_t{item.tile.rows} * item.tile.row_bytes;
    if (!fits(item, 16) || bytes > staging.size()) {
      return CUDA_ERROR_MISALIGNED_ADDRESS;
    }
    const auto rows = [&](bool read) {
      for (std::uint32_t row = 0; row < item.tile.rows; ++row) {
        char* staged = staging.data() + row * item.tile.row_bytes;
        char* page = reinterpret_cast<char*>(item.page + row * item.tile.row_stride);
        std::memcpy(read ? staged : page, read ? page : staged, item.tile.row_bytes);
      }
    };
    char* arena = reinterpret_cast<char*>(item.arena);
    if (batch.load != 0) {
      std::memcpy(staging.data(), arena, bytes);
      rows(false);
    } else {
      rows(true);
      std::memcpy(arena, staging.data(), bytes);
    }
  }
  return CUDA_SUCCESS;
}

inline CUresult run_kernel(const std::string& name, const CopyBatch& batch, unsigned int blocks,
                           unsigned int threads) {
  const std::uint32_t warps = blocks * (threads / flexkv::cuda::kWarpThreads);
  if (name == flexkv::cuda::kBulkKernel) return run_bulk(batch);
  if (name == "fkv_copy_16") return run_copy<Unit16>(batch, warps);
  if (name == "fkv_copy_8") return run_copy<std::uint64_t>(batch, warps);
  if (name == "fkv_copy_4") return run_copy<std::uint32_t>(batch, warps);
  if (name == "fkv_copy_2") return run_copy<std::uint16_t>(batch, warps);
  return run_copy<std::uint8_t>(batch, warps);
}

}  // namespace fake
