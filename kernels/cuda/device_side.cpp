// SPDX-License-Identifier: Apache-2.0
#include "device_side.hpp"

#include <utility>

namespace flexkv::cuda {
namespace {

struct Priorities {
  int lowest = 0;
  int highest = 0;
};

Priorities priorities(const Driver& driver) {
  Priorities range;
  driver.check(driver.cuCtxGetStreamPriorityRange(&range.lowest, &range.highest),
               "cuCtxGetStreamPriorityRange");
  return range;
}

// Where memory is short, rings are smaller; without room for any, transfers go other ways.
std::unique_ptr<StagedCopies> make_staged(const Device& device, const KernelCopies& kernels,
                                          const HostRange& range, const Layout& layout,
                                          const CudaTuning& tuning) {
  if (tuning.ring_bytes == 0) {
    return nullptr;
  }
  for (std::uint64_t bytes = tuning.ring_bytes;; bytes /= 2) {
    try {
      return std::make_unique<StagedCopies>(device, kernels, range, layout, bytes);
    } catch (const DriverError& error) {
      if (error.result != CUDA_ERROR_OUT_OF_MEMORY) {
        throw;
      }
      if (bytes / 2 < StagedCopies::kMinRingBytes) {
        if (tuning.forced.has_value()) {
          throw;
        }
        return nullptr;
      }
    }
  }
}

}  // namespace

DeviceSide::DeviceSide(std::shared_ptr<Device> on, const Layout& layout, const CudaTuning& tuning,
                       WayCounts& counts)
    : device(std::move(on)),
      arena(driver(), layout),
      events(driver()),
      timed_events(driver(), true),
      lanes{Lane(driver(), priorities(driver()).highest),
            Lane(driver(), priorities(driver()).lowest)},
      tiles(driver(), layout, lanes[0].stream()),
      driver_copies(driver(), layout, arena.range()),
      kernel_copies(*device, tiles, arena.device_address()),
      staged_copies(make_staged(*device, kernel_copies, arena.range(), layout, tuning)),
      ways(tuning, *device, staged_copies.get(), arena.device_address(), counts) {
  // A device that cannot run the kernels shows it now, not in the first transfer.
  kernel_copies.launch_empty(lanes[0].stream());
  driver().check(driver().cuStreamSynchronize(lanes[0].stream()), "an empty launch of the kernels");
}

}  // namespace flexkv::cuda
