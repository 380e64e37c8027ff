// SPDX-License-Identifier: Apache-2.0
//
// One device: its primary context, which the engine uses too, and the copy kernels loaded into it.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "driver.hpp"
#include "flexkv/mover.h"
#include "kernel_names.hpp"

namespace flexkv::cuda {

// Shared by all movers of the process on that device.
class Device {
 public:
  // Throws InvalidArgument for an ordinal that is no device, DriverError, std::bad_alloc.
  static std::shared_ptr<Device> open(const Driver& driver, std::int32_t ordinal);

  Device(const Driver& driver, std::int32_t ordinal);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const Driver& driver() const noexcept { return driver_; }
  CUcontext context() const noexcept { return context_; }
  // Whether the processor has bulk copies and the shared memory that their kernel takes.
  bool has_bulk_copy() const noexcept { return bulk_ != nullptr; }
  // The kernel for accesses of `width` bytes: 16, 8, 4, 2 or 1.
  CUfunction copy_kernel(std::uint32_t width) const noexcept;
  CUfunction bulk_kernel() const noexcept { return bulk_; }

 private:
  void load_kernels();
  int attribute(CUdevice_attribute attribute) const;

  const Driver& driver_;
  CUdevice device_ = 0;
  CUcontext context_ = nullptr;
  CUmodule module_ = nullptr;
  std::array<CUfunction, kCopyKernels.size()> copies_{};
  CUfunction bulk_ = nullptr;
};

// Makes the device's context current for a scope, and allows calls in it that another thread's
// capture of a graph would forbid: they concern no stream that is captured.
class CurrentDevice {
 public:
  // Throws DriverError.
  explicit CurrentDevice(const Device& device);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  const Driver& driver_;
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

// For a call about a stream that the caller has named, as its argument `name`: throws InvalidArgument if
// it is no stream of the device, DriverError.
void check_stream(const Driver& driver, CUresult result, const std::string& name,
                  std::uint64_t stream, const std::string& call);

// Throws InvalidArgument if what is put into the caller's stream goes to a graph, and not to the device.
void check_not_captured(const Driver& driver, const std::string& name, std::uint64_t stream);

// How many devices there are. Throws DriverError.
std::int32_t device_count(const Driver& driver);

// Throws InvalidArgument, DriverError.
fkv_cuda_device describe_device(const Driver& driver, std::int32_t ordinal);

}  // namespace flexkv::cuda
