// SPDX-License-Identifier: Apache-2.0
//
// The entry points of the copy kernels. nvcc compiles this file, and only its device code, to the
// fatbin that fatbin.cpp.in embeds.
#include <cstdint>

#include "bulk_copy.hpp"
#include "bulk_ptx.cuh"
#include "copy_tile.hpp"
#include "kernel_names.hpp"

using flexkv::cuda::CopyBatch;

// Two blocks fit a multiprocessor: half of its 64 Ki registers.
#define FKV_KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads, 2)

namespace {

__device__ flexkv::cuda::ThreadPlace place() {
  return {blockIdx.x, gridDim.x, threadIdx.x, blockDim.x};
}

}  // namespace

#define FKV_COPY_KERNEL(width, Unit)                                                      \
  FKV_KERNEL(flexkv::cuda::kCopyThreads)                                                  \
  fkv_copy_##width(const __grid_constant__ CopyBatch batch) {                             \
    static_assert(sizeof(Unit) == (width));                                               \
    flexkv::cuda::copy_kernel<Unit>(batch, place());                                      \
  }

FKV_COPY_KERNEL(16, uint4)
FKV_COPY_KERNEL(8, uint2)
FKV_COPY_KERNEL(4, unsigned int)
FKV_COPY_KERNEL(2, unsigned short)
FKV_COPY_KERNEL(1, unsigned char)

// Of processors of sm_120 the registers are too few for the compiler, and no attention kernel of them is
// known to leave so few.
#if __CUDA_ARCH__ >= 1200
#define FKV_BULK_REGISTERS 40
#else
#define FKV_BULK_REGISTERS flexkv::cuda::kLeanRegisters
#endif

// Empty for processors without bulk copies; the mover does not launch it there.
extern "C" __global__ void __maxnreg__(FKV_BULK_REGISTERS)
fkv_copy_bulk(const __grid_constant__ CopyBatch batch) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned char staging[];
  __shared__ std::uint64_t barriers[flexkv::cuda::kBulkBarriers];
  const auto shared = [](const void* pointer) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
  };
  flexkv::cuda::BulkPtx ops{shared(staging), shared(barriers)};
  flexkv::cuda::bulk_kernel(ops, batch, place());
#endif
}
