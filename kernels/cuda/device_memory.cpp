// SPDX-License-Identifier: Apache-2.0
#include "device_memory.hpp"

#include <map>
#include <memory>
#include <mutex>

#include "device.hpp"

namespace flexkv::cuda {
namespace {

std::mutex& mutex = *new std::mutex;
auto& allocated = *new std::map<std::uint64_t, std::shared_ptr<Device>>;

}  // namespace

std::uint64_t allocate(const Driver& driver, std::int32_t ordinal, std::uint64_t bytes) {
  const std::shared_ptr<Device> device = Device::open(driver, ordinal);
  const CurrentDevice current(*device);
  CUdeviceptr address = 0;
  driver.check(driver.cuMemAlloc(&address, bytes), "cuMemAlloc");
  const std::lock_guard lock(mutex);
  allocated[address] = device;
  return address;
}

void release(std::uint64_t address) noexcept {
  std::shared_ptr<Device> device;
  {
    const std::lock_guard lock(mutex);
    const auto found = allocated.find(address);
    if (found == allocated.end()) {
      return;
    }
    device = std::move(found->second);
    allocated.erase(found);
  }
  try {
    const CurrentDevice current(*device);
    device->driver().cuMemFree(address);
  } catch (const DriverError&) {
    // The context has failed, and its memory with it.
  }
}

}  // namespace flexkv::cuda
