// SPDX-License-Identifier: Apache-2.0
//
// NVIDIA's driver, found at run time: nothing of CUDA is linked, so that one library runs on machines
// with and without it.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>

#include <cstddef>
#include <stdexcept>
#include <string>

#include "host_registration.hpp"

#if CUDA_VERSION < 12080
#error "the CUDA mover needs cuda.h of CUDA 12.8 or newer"
#endif

namespace flexkv::cuda {

// There is no driver, or it cannot be used; what() is the message for the user.
class NoDriver : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A call of the driver failed.
class DriverError : public std::runtime_error {
 public:
  DriverError(CUresult result, const std::string& message)
      : std::runtime_error(message), result(result) {}

  CUresult result;
};

// The batch copy of CUDA 13.0 has no failIdx; spelled out because older headers lack the type.
using BatchCopy13 = CUresult (*)(CUdeviceptr*, CUdeviceptr*, std::size_t*, std::size_t,
                                 CUmemcpyAttributes*, std::size_t*, std::size_t, CUstream);
using BatchCopy12 = PFN_cuMemcpyBatchAsync_v12080;

// "12.8" for 12080.
std::string version_text(int version);

// The functions used, each in the version whose type stands here. The names are the driver's.
// Immutable after loading; shared by all movers of the process and never unloaded, because threads
// of the driver may outlive every mover.
struct Driver {
  int version = 0;  // 1000 * major + 10 * minor

  PFN_cuGetErrorName_v6000 cuGetErrorName = nullptr;
  PFN_cuGetErrorString_v6000 cuGetErrorString = nullptr;
  PFN_cuInit_v2000 cuInit = nullptr;
  PFN_cuDeviceGetCount_v2000 cuDeviceGetCount = nullptr;
  PFN_cuDeviceGet_v2000 cuDeviceGet = nullptr;
  PFN_cuDeviceGetName_v2000 cuDeviceGetName = nullptr;
  PFN_cuDeviceGetPCIBusId_v4010 cuDeviceGetPCIBusId = nullptr;
  PFN_cuDeviceGetAttribute_v2000 cuDeviceGetAttribute = nullptr;
  PFN_cuDevicePrimaryCtxRetain_v7000 cuDevicePrimaryCtxRetain = nullptr;
  PFN_cuDevicePrimaryCtxRelease_v11000 cuDevicePrimaryCtxRelease = nullptr;
  PFN_cuCtxPushCurrent_v4000 cuCtxPushCurrent = nullptr;
  PFN_cuCtxPopCurrent_v4000 cuCtxPopCurrent = nullptr;
  PFN_cuCtxGetStreamPriorityRange_v5050 cuCtxGetStreamPriorityRange = nullptr;
  PFN_cuThreadExchangeStreamCaptureMode_v10010 cuThreadExchangeStreamCaptureMode = nullptr;
  PFN_cuModuleLoadData_v2000 cuModuleLoadData = nullptr;
  PFN_cuModuleUnload_v2000 cuModuleUnload = nullptr;
  PFN_cuModuleGetFunction_v2000 cuModuleGetFunction = nullptr;
  PFN_cuFuncGetAttribute_v2020 cuFuncGetAttribute = nullptr;
  PFN_cuFuncSetAttribute_v9000 cuFuncSetAttribute = nullptr;
  PFN_cuStreamCreateWithPriority_v5050 cuStreamCreateWithPriority = nullptr;
  PFN_cuStreamDestroy_v4000 cuStreamDestroy = nullptr;
  PFN_cuStreamSynchronize_v2000 cuStreamSynchronize = nullptr;
  PFN_cuStreamWaitEvent_v3020 cuStreamWaitEvent = nullptr;
  PFN_cuStreamIsCapturing_v10000 cuStreamIsCapturing = nullptr;
  PFN_cuStreamWriteValue32_v11070 cuStreamWriteValue32 = nullptr;
  PFN_cuEventCreate_v2000 cuEventCreate = nullptr;
  PFN_cuEventDestroy_v4000 cuEventDestroy = nullptr;
  PFN_cuEventRecord_v2000 cuEventRecord = nullptr;
  PFN_cuEventQuery_v2000 cuEventQuery = nullptr;
  PFN_cuEventElapsedTime_v2000 cuEventElapsedTime = nullptr;
  PFN_cuMemAlloc_v3020 cuMemAlloc = nullptr;
  PFN_cuMemFree_v3020 cuMemFree = nullptr;
  PFN_cuMemcpyAsync_v4000 cuMemcpyAsync = nullptr;
  PFN_cuLaunchKernel_v4000 cuLaunchKernel = nullptr;
  PFN_cuMemHostRegister_v6050 cuMemHostRegister = nullptr;
  PFN_cuMemHostUnregister_v4000 cuMemHostUnregister = nullptr;
  PFN_cuMemHostGetDevicePointer_v3020 cuMemHostGetDevicePointer = nullptr;

  // At most one of the two; neither where the driver is older than CUDA 12.8.
  BatchCopy13 cuMemcpyBatchAsync13 = nullptr;
  BatchCopy12 cuMemcpyBatchAsync12 = nullptr;

  // "NAME: what it means (while doing)".
  std::string describe(CUresult result, const std::string& doing) const;

  // Throws DriverError unless `result` is success.
  void check(CUresult result, const std::string& doing) const {
    if (result != CUDA_SUCCESS) {
      throw DriverError(result, describe(result, doing));
    }
  }

  // The host memory this process has registered with the driver.
  mutable HostRegistry registry;
};

// The driver in the shared library at `path` (nullptr: libcuda.so.1), loaded once per process and
// initialised. In a process forked from one that did so the driver refuses to work. Throws NoDriver,
// std::bad_alloc.
const Driver& load_driver(const char* path);

}  // namespace flexkv::cuda
