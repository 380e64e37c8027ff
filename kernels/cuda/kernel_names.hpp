// SPDX-License-Identifier: Apache-2.0
//
// What host code must know of the kernels in kernels.cu.
#pragma once

#include <array>
#include <cstdint>

#include "tiles.hpp"

namespace flexkv::cuda {

// One kernel for each width of an access in bytes, widest first.
struct CopyKernelName {
  std::uint32_t width;
  const char* name;
};

constexpr std::array<CopyKernelName, 5> kCopyKernels{{{16, "fkv_copy_16"},
                                                      {8, "fkv_copy_8"},
                                                      {4, "fkv_copy_4"},
                                                      {2, "fkv_copy_2"},
                                                      {1, "fkv_copy_1"}}};

// 16 warps with 4 KiB in flight each are 64 KiB a multiprocessor; a PCIe 5.0 link needs about 100 KiB
// in all (55 GB/s for some 2 us there and back).
constexpr std::uint32_t kCopyThreads = 512;

constexpr const char* kBulkKernel = "fkv_copy_bulk";

// Staging of the bulk kernel: each warp has kBulkStages tiles in shared memory. Of kBulkWarps, which
// drive the link, 96 KiB in all, which every processor since sm_90 has for one thread block.
constexpr std::uint32_t kBulkWarps = 3;
constexpr std::uint32_t kBulkStages = 4;
constexpr std::uint32_t kBulkThreads = kBulkWarps * kWarpThreads;
constexpr std::uint32_t kBulkSharedBytes = kBulkWarps * kBulkStages * kTileBytes;

// A block of it between a ring and the pages is one warp, so that it fits a multiprocessor beside a
// kernel that fills it: FlashAttention 3 takes 384 * 168 of 65,536 registers, which leaves 1,024.
constexpr std::uint32_t kLeanThreads = kWarpThreads;
constexpr std::uint32_t kLeanRegisters = 1024 / kLeanThreads;
constexpr std::uint32_t kLeanSharedBytes = kBulkStages * kStagedTileBytes;

// One for each stage of each warp, beside that.
constexpr std::uint32_t kBarrierBytes = 8;
constexpr std::uint32_t kBulkBarriers = kBulkWarps * kBulkStages;

// Room for them, generously.
constexpr std::uint32_t kBulkReservedBytes = 1024;

}  // namespace flexkv::cuda
