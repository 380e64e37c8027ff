// SPDX-License-Identifier: Apache-2.0
#include "cuda_tuning.hpp"

#include <string>

#include "mover.hpp"

namespace flexkv::cuda {
namespace {

constexpr std::uint32_t kMaxThreadBlocks = 1024;

// 6 % of an H200's multiprocessors. A guess from others' reports (12 of 132 for plain accesses, 4 of
// 152 for bulk copies), not tuned yet.
constexpr std::uint32_t kThreadBlocks = 8;

std::optional<Path> path_of(std::uint32_t mode) {
  switch (mode) {
    case FKV_CUDA_AUTO:
      return std::nullopt;
    case FKV_CUDA_DMA:
      return Path::driver;
    case FKV_CUDA_KERNEL:
      return Path::kernel;
    case FKV_CUDA_TMA:
      return Path::bulk_kernel;
    default:
      throw InvalidArgument("mode is " + std::to_string(mode) +
                            ", it must be 0 (auto), 1 (DMA), 2 (kernel) or 3 (TMA)");
  }
}

Path kernel_of(const char* name, std::uint32_t mode) {
  if (mode != FKV_CUDA_AUTO && mode != FKV_CUDA_KERNEL && mode != FKV_CUDA_TMA) {
    throw InvalidArgument(std::string(name) + " is " + std::to_string(mode) +
                          ", it must be 2 (kernel), 3 (TMA) or 0 (kernel)");
  }
  return mode == FKV_CUDA_TMA ? Path::bulk_kernel : Path::kernel;
}

}  // namespace

CudaTuning tune(const fkv_cuda_options& options) {
  if (options.thread_blocks > kMaxThreadBlocks) {
    throw InvalidArgument("thread_blocks is " + std::to_string(options.thread_blocks) +
                          ", it must be at most " + std::to_string(kMaxThreadBlocks));
  }
  return {path_of(options.mode),
          {options.load_crossover, options.store_crossover},
          {kernel_of("load_kernel", options.load_kernel),
           kernel_of("store_kernel", options.store_kernel)},
          options.thread_blocks == 0 ? kThreadBlocks : options.thread_blocks};
}

}  // namespace flexkv::cuda
