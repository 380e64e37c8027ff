// SPDX-License-Identifier: Apache-2.0
//
// The settings of the CUDA mover and their defaults.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "flexkv/mover.h"
#include "transfer.hpp"

namespace flexkv::cuda {

// Checked settings; see fkv_cuda_options.
struct CudaTuning {
  std::optional<Path> forced;              // every transfer goes this way
  std::array<std::uint64_t, 2> crossover;  // by Direction
  std::array<Path, 2> kernel;              // by Direction: the way below the crossover
  std::uint32_t thread_blocks;
};

// Checks the options and fills in what they leave open. Throws InvalidArgument.
CudaTuning tune(const fkv_cuda_options& options);

}  // namespace flexkv::cuda
