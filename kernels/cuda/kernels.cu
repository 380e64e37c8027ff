// SPDX-License-Identifier: Apache-2.0
//
// The entry points of the copy kernels. nvcc compiles this file, and only its device code, to the
// fatbin that fatbin.cpp.in embeds.
#include <cstdint>

#include "bulk_copy.cuh"
#include "copy_tile.hpp"
#include "kernel_names.hpp"

using flexkv::cuda::CopyBatch;
using flexkv::cuda::kWarpThreads;

#define FKV_COPY_KERNEL(width, Unit)                                                          \
  extern "C" __global__ void __launch_bounds__(flexkv::cuda::kCopyThreads)                    \
      fkv_copy_##width(const __grid_constant__ CopyBatch batch) {                             \
    static_assert(sizeof(Unit) == (width));                                                   \
    const std::uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x;                       \
    flexkv::cuda::copy_items<Unit>(batch, thread / kWarpThreads,                              \
                                   gridDim.x * blockDim.x / kWarpThreads, thread % kWarpThreads); \
  }

FKV_COPY_KERNEL(16, uint4)
FKV_COPY_KERNEL(8, uint2)
FKV_COPY_KERNEL(4, unsigned int)
FKV_COPY_KERNEL(2, unsigned short)
FKV_COPY_KERNEL(1, unsigned char)

// Empty for processors without bulk copies; the mover does not launch it there.
extern "C" __global__ void __launch_bounds__(flexkv::cuda::kBulkThreads)
    fkv_copy_bulk(const __grid_constant__ CopyBatch batch) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned char staging[];
  __shared__ std::uint64_t barriers[flexkv::cuda::kBulkWarps][flexkv::cuda::kBulkStages];
  const std::uint32_t warp = threadIdx.x / kWarpThreads;
  const std::uint32_t lane = threadIdx.x % kWarpThreads;
  const auto shared = [](const void* pointer) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
  };
  if (lane < flexkv::cuda::kBulkStages) {
    flexkv::cuda::barrier_init(shared(&barriers[warp][lane]));
    // Bulk copies must see the barriers initialised.
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncwarp();
  flexkv::cuda::bulk_copy_items(
      batch, blockIdx.x * flexkv::cuda::kBulkWarps + warp, gridDim.x * flexkv::cuda::kBulkWarps,
      lane, shared(staging) + warp * flexkv::cuda::kBulkStages * flexkv::cuda::kTileBytes,
      shared(&barriers[warp][0]));
#endif
}
