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

}  // namespace

DeviceSide::DeviceSide(std::shared_ptr<Device> on, const Layout& layout, const CudaTuning& tuning)
    : device(std::move(on)),
      arena(driver(), layout),
      events(driver()),
      timed_events(driver(), true),
      lanes{Lane(driver(), priorities(driver()).highest),
            Lane(driver(), priorities(driver()).lowest)},
      tiles(driver(), layout, arena.device_address(), lanes[0].stream()),
      driver_copies(driver(), layout, arena.range()),
      kernel_copies(*device, tiles, arena.device_address(), tuning.thread_blocks) {
  // A device that cannot run the kernels shows it now, not in the first transfer.
  kernel_copies.launch_empty(lanes[0].stream());
  driver().check(driver().cuStreamSynchronize(lanes[0].stream()), "an empty launch of the kernels");
}

}  // namespace flexkv::cuda
