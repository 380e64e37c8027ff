// SPDX-License-Identifier: Apache-2.0
//
// Host memory registered with the driver: page-locked and visible to the devices.
#pragma once

#include <cstdint>
#include <list>
#include <mutex>

namespace flexkv::cuda {

struct Driver;

// One registered range of memory.
struct HostRange {
  std::uint64_t address;
  std::uint64_t bytes;
  std::uint64_t device_address;  // where the devices see it
  std::uint32_t users;
};

// All ranges of the process. Movers over the same arena share one registration: the driver refuses
// to register memory twice. Thread-safe.
class HostRegistry {
 public:
  // The range that holds these bytes, registered now unless one does already. A device must be
  // current. Throws InvalidArgument for memory that cannot be registered, saying why, and
  // std::bad_alloc. The reference is good until it is released.
  HostRange& acquire(const Driver& driver, std::uint64_t address, std::uint64_t bytes);

  // Unregisters the range with its last user. Errors are ignored: after one that ended the context
  // the driver has nothing left to undo.
  void release(const Driver& driver, HostRange& range) noexcept;

 private:
  std::mutex mutex_;
  std::list<HostRange> ranges_;
};

// Bytes up to the end of the piece of the range that was registered in one call: a copy by the
// driver must not pass it.
std::uint64_t bytes_to_border(const HostRange& range, std::uint64_t address) noexcept;

}  // namespace flexkv::cuda
