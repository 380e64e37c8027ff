// SPDX-License-Identifier: Apache-2.0
//
// The settings of the CUDA mover, their defaults, and the way that a transfer goes.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <tuple>

#include "flexkv/mover.h"
#include "transfer.hpp"

namespace flexkv::cuda {

// A way, and for kernels the most thread blocks of a launch.
struct Way {
  Path path;
  std::uint32_t thread_blocks;
};

// How a transfer falls apart: direction, and the powers of two in the mean bytes of its runs and of its
// runs in the arena alone.
using RunClass = std::tuple<Direction, int, int>;

RunClass class_of(Direction direction, std::uint64_t run_bytes, std::uint64_t slot_run_bytes);

// Checked settings; see fkv_cuda_options.
struct CudaTuning {
  std::optional<Path> forced;  // every transfer goes this way
  std::uint32_t thread_blocks;  // 0: as the way says
  std::uint64_t ring_bytes;     // 0: no ring
  std::map<RunClass, Way> choices;

  // For a transfer with runs of these mean lengths.
  Way choose(Direction direction, std::uint64_t run_bytes, std::uint64_t slot_run_bytes) const;

 private:
  // What was measured for the class, or for the one like it that is nearest; nullptr if there is none.
  const Way* measured(const RunClass& wanted) const;
};

// The way of a measurement. Throws InvalidArgument unless the mode is a way and thread_blocks is in range.
Way forced_way(std::uint32_t mode, std::uint32_t thread_blocks);

// Checks the options and fills in what they leave open. Throws InvalidArgument, std::bad_alloc.
CudaTuning tune(const fkv_cuda_options& options);

}  // namespace flexkv::cuda
