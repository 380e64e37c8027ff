// SPDX-License-Identifier: Apache-2.0
#include "host_registration.hpp"

#include <sys/resource.h>

#include <algorithm>
#include <string>

#include "driver.hpp"
#include "mover.hpp"

namespace flexkv::cuda {
namespace {

// Registering takes a lock of the driver and of the process's memory map for as long as the pages
// of one call are pinned (some 0.1 s per GiB), in which no other thread can map memory.
constexpr std::uint64_t kPieceBytes = std::uint64_t{1} << 30;

constexpr unsigned int kFlags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;

std::string mebibytes(std::uint64_t bytes) { return std::to_string(bytes >> 20) + " MiB"; }

std::string memlock_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0) {
    return "unknown";
  }
  return limit.rlim_cur == RLIM_INFINITY ? "unlimited" : mebibytes(limit.rlim_cur);
}

std::string refusal(const Driver& driver, CUresult result, std::uint64_t done,
                    std::uint64_t bytes) {
  std::string message = "the driver registered " + mebibytes(done) + " of an arena of " +
                        mebibytes(bytes) + " and then refused: " +
                        driver.describe(result, "cuMemHostRegister") + ". ";
  switch (result) {
    case CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED:
      return message + "Something else in this process has registered a part of it";
    case CUDA_ERROR_OUT_OF_MEMORY:
    case CUDA_ERROR_NOT_PERMITTED:
    case CUDA_ERROR_OPERATING_SYSTEM:
      return message + "The limit of locked memory (RLIMIT_MEMLOCK, `ulimit -l`) is " +
             memlock_limit() + ": it must be unlimited or more than " + mebibytes(bytes) +
             " (docker: --ulimit memlock=-1), and so much memory must be free";
    default:
      return message + "It must be mapped memory of this process, from a page's first byte on";
  }
}

void unregister(const Driver& driver, std::uint64_t address, std::uint64_t bytes) noexcept {
  for (std::uint64_t done = 0; done < bytes; done += kPieceBytes) {
    driver.cuMemHostUnregister(reinterpret_cast<void*>(address + done));
  }
}

// Registers the pieces; on an error those registered are undone.
std::uint64_t register_pieces(const Driver& driver, std::uint64_t address, std::uint64_t bytes) {
  std::uint64_t device_address = 0;
  for (std::uint64_t done = 0; done < bytes; done += kPieceBytes) {
    void* piece = reinterpret_cast<void*>(address + done);
    CUresult result =
        driver.cuMemHostRegister(piece, std::min(kPieceBytes, bytes - done), kFlags);
    if (result != CUDA_SUCCESS) {
      unregister(driver, address, done);
      throw InvalidArgument(refusal(driver, result, done, bytes));
    }
    CUdeviceptr seen = 0;
    result = driver.cuMemHostGetDevicePointer(&seen, piece, 0);
    if (done == 0) {
      device_address = seen;
    }
    if (result != CUDA_SUCCESS || seen != device_address + done) {
      unregister(driver, address, done + 1);
      throw InvalidArgument("the device does not see the arena as one piece of memory: use one of at "
                            "most " + mebibytes(kPieceBytes));
    }
  }
  return device_address;
}

}  // namespace

HostRange& HostRegistry::acquire(const Driver& driver, std::uint64_t address,
                                 std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  for (HostRange& range : ranges_) {
    if (range.address <= address && address + bytes <= range.address + range.bytes) {
      range.users += 1;
      return range;
    }
  }
  ranges_.push_back({address, bytes, 0, 1});
  try {
    ranges_.back().device_address = register_pieces(driver, address, bytes);
  } catch (...) {
    ranges_.pop_back();
    throw;
  }
  return ranges_.back();
}

void HostRegistry::release(const Driver& driver, HostRange& range) noexcept {
  const std::lock_guard lock(mutex_);
  range.users -= 1;
  if (range.users == 0) {
    unregister(driver, range.address, range.bytes);
    ranges_.remove_if([&](const HostRange& other) { return &other == &range; });
  }
}

std::uint64_t bytes_to_border(const HostRange& range, std::uint64_t address) noexcept {
  return kPieceBytes - (address - range.address) % kPieceBytes;
}

}  // namespace flexkv::cuda
