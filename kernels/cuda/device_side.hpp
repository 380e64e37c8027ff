// SPDX-License-Identifier: Apache-2.0
//
// Everything a CUDA mover holds of its device.
#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "cuda_tuning.hpp"
#include "device.hpp"
#include "driver_copies.hpp"
#include "event_pool.hpp"
#include "host_registration.hpp"
#include "kernel_copies.hpp"
#include "lane.hpp"
#include "layout.hpp"
#include "staged_copies.hpp"
#include "tile_table.hpp"
#include "ways.hpp"

namespace flexkv::cuda {

// The arena, registered as long as this lives.
class RegisteredArena {
 public:
  RegisteredArena(const Driver& driver, const Layout& layout)
      : driver_(driver),
        range_(driver.registry.acquire(driver, reinterpret_cast<std::uintptr_t>(layout.arena()),
                                       layout.arena_bytes())),
        host_address_(reinterpret_cast<std::uintptr_t>(layout.arena())),
        bytes_(layout.arena_bytes()) {}
  ~RegisteredArena() { driver_.registry.release(driver_, range_); }
  RegisteredArena(const RegisteredArena&) = delete;
  RegisteredArena& operator=(const RegisteredArena&) = delete;

  const HostRange& range() const noexcept { return range_; }

  // Where the device sees the arena.
  std::uint64_t device_address() const noexcept {
    return range_.device_address + (host_address_ - range_.address);
  }

  // Where the device sees a word of this process, or 0 if the word is not in the arena.
  std::uint64_t device_address_of(const std::uint32_t* word) const noexcept {
    const std::uint64_t offset = reinterpret_cast<std::uintptr_t>(word) - host_address_;
    return offset < bytes_ && bytes_ - offset >= sizeof(*word) ? device_address() + offset : 0;
  }

 private:
  const Driver& driver_;
  HostRange& range_;
  const std::uint64_t host_address_;
  const std::uint64_t bytes_;
};

// A device must be current when one is made or destroyed.
struct DeviceSide {
  // All arguments must outlive this. Throws InvalidArgument, DriverError, std::bad_alloc.
  DeviceSide(std::shared_ptr<Device> on, const Layout& layout, const CudaTuning& tuning,
             WayCounts& counts);

  const Driver& driver() const noexcept { return device->driver(); }

  std::shared_ptr<Device> device;
  RegisteredArena arena;
  EventPool events;
  EventPool timed_events;
  // By Direction. An engine waits for loads: their kernels get the next free multiprocessors. Nobody
  // waits for stores: theirs take what is left.
  std::array<Lane, 2> lanes;
  TileTable tiles;
  DriverCopies driver_copies;
  KernelCopies kernel_copies;
  // None if no transfer is to go this way, or if device memory for the rings is short.
  const std::unique_ptr<StagedCopies> staged_copies;
  Ways ways;
};

}  // namespace flexkv::cuda
