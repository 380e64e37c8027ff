// SPDX-License-Identifier: Apache-2.0
//
// Names of what the mover's calls are for, in the timelines of NVIDIA's profilers (NVTX). Without a
// profiler a range costs a few nanoseconds. A build that has no NVTX headers has no ranges.
#pragma once

#if __has_include(<nvtx3/nvtx3.hpp>)
#include <nvtx3/nvtx3.hpp>
#endif

#include "mover.hpp"

namespace flexkv::cuda {

#if __has_include(<nvtx3/nvtx3.hpp>)
struct RangeDomain {
  static constexpr const char* name = "flexkv";
};

using Range = nvtx3::scoped_range_in<RangeDomain>;
#else
struct Range {
  explicit Range(const char* /*name*/) {}
  ~Range() {}  // so that no compiler calls it unused
};
#endif

constexpr const char* by_direction(Direction direction, const char* load, const char* store) {
  return direction == Direction::load ? load : store;
}

}  // namespace flexkv::cuda
