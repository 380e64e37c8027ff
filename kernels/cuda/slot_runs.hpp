// SPDX-License-Identifier: Apache-2.0
//
// The bytes of a transfer as the arena has them, for copies that do not look at pages.
#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "geometry.hpp"

namespace flexkv::cuda {

// Bytes that are contiguous in every slot, whatever the pages are.
struct SlotRun {
  std::uint64_t slot;  // bytes behind a block's place
  std::uint64_t bytes;
  std::uint64_t start;  // bytes of the runs before it: its place where a block has no gaps
};

// Those of some planes, by place.
struct SlotRuns {
  std::vector<SlotRun> runs;
  std::uint64_t bytes = 0;  // of all
};

// Throws std::bad_alloc.
SlotRuns slot_runs(const Geometry& geometry);

// The mean bytes of the first runs of so many blocks, neighbours in the arena taken as one.
std::uint64_t mean_slot_run(const SlotRuns& runs, const std::vector<std::uint64_t>& offsets);

// Made once for each range of planes that is copied. Of one thread.
class SlotRunTable {
 public:
  // Good as long as the table. Throws std::bad_alloc.
  const SlotRuns& of(const Geometry& geometry);

 private:
  std::map<std::pair<std::uint32_t, std::uint32_t>, SlotRuns> known_;
};

}  // namespace flexkv::cuda
