// SPDX-License-Identifier: Apache-2.0
//
// The copy kernels as the fake device runs them: by the code that the real device runs, thread by
// thread; the instructions that only a device has are those of bulk_engine.hpp.
#pragma once

#include <cuda.h>

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "bulk_copy.hpp"
#include "bulk_engine.hpp"
#include "copy_tile.hpp"
#include "kernel_names.hpp"
#include "tiles.hpp"
#include "warp.hpp"

namespace fake {

using flexkv::cuda::CopyBatch;
using flexkv::cuda::Item;
using flexkv::cuda::kWarpThreads;

// What a launch was given.
struct Launch {
  std::string kernel;
  std::uint32_t blocks;
  std::uint32_t threads;
  std::uint32_t shared_bytes;
  CopyBatch batch;
};

// The most threads of a block that the kernel was compiled for.
inline std::uint32_t thread_bound(const std::string& kernel) {
  return kernel == flexkv::cuda::kBulkKernel ? flexkv::cuda::kBulkThreads
                                             : flexkv::cuda::kCopyThreads;
}

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
CUresult run_copy(const Launch& launch) {
  for (std::uint32_t i = 0; i < flexkv::cuda::item_count(launch.batch); ++i) {
    if (!fits(flexkv::cuda::item_at(launch.batch, i), sizeof(Unit))) {
      return CUDA_ERROR_MISALIGNED_ADDRESS;
    }
  }
  for (std::uint32_t block = 0; block < launch.blocks; ++block) {
    for (std::uint32_t thread = 0; thread < launch.threads; ++thread) {
      flexkv::cuda::copy_kernel<Unit>(launch.batch,
                                      {block, launch.blocks, thread, launch.threads});
    }
  }
  return CUDA_SUCCESS;
}

// The warps of a block take turns, as they share its memory.
inline CUresult run_block(const Launch& launch, std::uint32_t block, std::minstd_rand& random) {
  static thread_local std::array<Warp, flexkv::cuda::kBulkWarps> warps;
  std::vector<char> shared(launch.shared_bytes, '\x5a');
  std::deque<BulkEngine> engines;
  std::deque<std::function<void(std::uint32_t)>> lanes;
  const std::uint32_t count = launch.threads / kWarpThreads;
  for (std::uint32_t warp = 0; warp < count; ++warp) {
    BulkEngine& engine = engines.emplace_back(warps[warp], shared, random);
    const std::uint32_t first = warp * kWarpThreads;
    warps[warp].begin(lanes.emplace_back([&launch, &engine, block, first](std::uint32_t lane) {
      flexkv::cuda::bulk_kernel(engine, launch.batch,
                                {block, launch.blocks, first + lane, launch.threads});
    }));
  }
  for (std::uint32_t left = count; left != 0;) {
    left = 0;
    for (std::uint32_t warp = 0; warp < count; ++warp) {
      if (warps[warp].ended()) continue;
      left += 1;
      if (random() % 4 == 0) continue;  // one warp falls behind another
      if (!warps[warp].turn(random)) return CUDA_ERROR_LAUNCH_TIMEOUT;
    }
  }
  for (const BulkEngine& engine : engines) {
    if (engine.error() != CUDA_SUCCESS) return engine.error();
  }
  return CUDA_SUCCESS;
}

inline CUresult run_bulk(const Launch& launch, std::uint32_t number) {
  std::minstd_rand random(number + 1);
  for (std::uint32_t block = 0; block < launch.blocks; ++block) {
    const CUresult result = run_block(launch, block, random);
    if (result != CUDA_SUCCESS) return result;
  }
  return CUDA_SUCCESS;
}

inline CUresult run_kernel(const Launch& launch, std::uint32_t number) {
  const std::string& name = launch.kernel;
  if (name == flexkv::cuda::kBulkKernel) return run_bulk(launch, number);
  if (name == "fkv_copy_16") return run_copy<Unit16>(launch);
  if (name == "fkv_copy_8") return run_copy<std::uint64_t>(launch);
  if (name == "fkv_copy_4") return run_copy<std::uint32_t>(launch);
  if (name == "fkv_copy_2") return run_copy<std::uint16_t>(launch);
  return run_copy<std::uint8_t>(launch);
}

}  // namespace fake
