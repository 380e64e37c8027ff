// SPDX-License-Identifier: Apache-2.0
#include "slot_runs.hpp"

#include <algorithm>

namespace flexkv::cuda {
namespace {

// Runs looked at to tell how a transfer falls apart; blocks of a transfer resemble one another.
constexpr std::uint64_t kSampledRuns = 256;

}  // namespace

SlotRuns slot_runs(const Geometry& geometry) {
  SlotRuns result;
  for (std::uint32_t i = geometry.first; i < geometry.last; ++i) {
    result.runs.push_back({geometry.planes[i].slot_offset, page_bytes(geometry.planes[i]), 0});
  }
  std::ranges::sort(result.runs, {}, &SlotRun::slot);
  std::size_t last = 0;
  for (std::size_t i = 1; i < result.runs.size(); ++i) {
    const SlotRun& run = result.runs[i];
    if (result.runs[last].slot + result.runs[last].bytes == run.slot) {
      result.runs[last].bytes += run.bytes;
    } else {
      result.runs[++last] = run;
    }
  }
  result.runs.resize(last + 1);
  for (SlotRun& run : result.runs) {
    run.start = result.bytes;
    result.bytes += run.bytes;
  }
  return result;
}

std::uint64_t mean_slot_run(const SlotRuns& runs, const std::vector<std::uint64_t>& offsets) {
  std::uint64_t bytes = 0;
  std::uint64_t count = 0;
  std::uint64_t end = 0;
  for (const std::uint64_t offset : offsets) {
    for (const SlotRun& run : runs.runs) {
      if (count == 0 || offset + run.slot != end) {
        if (count == kSampledRuns) {
          return bytes / count;
        }
        count += 1;
      }
      bytes += run.bytes;
      end = offset + run.slot + run.bytes;
    }
  }
  return bytes / std::max<std::uint64_t>(count, 1);
}

const SlotRuns& SlotRunTable::of(const Geometry& geometry) {
  const std::pair range{geometry.first, geometry.last};
  auto found = known_.find(range);
  if (found == known_.end()) {
    found = known_.emplace(range, slot_runs(geometry)).first;
  }
  return found->second;
}

}  // namespace flexkv::cuda
