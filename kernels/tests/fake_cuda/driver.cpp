// SPDX-License-Identifier: Apache-2.0
//
// A CUDA driver without a device: device memory is host memory, streams are threads. It checks what a
// real one would check of the mover's calls. Tests control it through the functions of control.hpp.
#include <cuda.h>
#include <cudaTypedefs.h>

#include <algorithm>
#include <cstring>

#include "api_context.hpp"
#include "api_copies.hpp"
#include "api_streams.hpp"
#include "control.hpp"
#include "state.hpp"

namespace fake {
namespace {

struct Function {
  const char* name;
  int version;  // that introduced this type
  void* address;
};

// The types make the compiler compare each function with the driver's declaration.
#define FUNCTION(name, since, type, function) \
  {name, since, reinterpret_cast<void*>(static_cast<type>(function))}

const Function kFunctions[] = {
    FUNCTION("cuGetErrorName", 6000, PFN_cuGetErrorName_v6000, get_error_name),
    FUNCTION("cuGetErrorString", 6000, PFN_cuGetErrorString_v6000, get_error_string),
    FUNCTION("cuDriverGetVersion", 2020, PFN_cuDriverGetVersion_v2020, driver_get_version),
    FUNCTION("cuInit", 2000, PFN_cuInit_v2000, init),
    FUNCTION("cuDeviceGetCount", 2000, PFN_cuDeviceGetCount_v2000, device_get_count),
    FUNCTION("cuDeviceGet", 2000, PFN_cuDeviceGet_v2000, device_get),
    FUNCTION("cuDeviceGetName", 2000, PFN_cuDeviceGetName_v2000, device_get_name),
    FUNCTION("cuDeviceGetPCIBusId", 4010, PFN_cuDeviceGetPCIBusId_v4010, device_get_pci_bus_id),
    FUNCTION("cuDeviceGetAttribute", 2000, PFN_cuDeviceGetAttribute_v2000, device_get_attribute),
    FUNCTION("cuDevicePrimaryCtxRetain", 7000, PFN_cuDevicePrimaryCtxRetain_v7000,
             primary_context_retain),
    FUNCTION("cuDevicePrimaryCtxRelease", 11000, PFN_cuDevicePrimaryCtxRelease_v11000,
             primary_context_release),
    FUNCTION("cuCtxPushCurrent", 4000, PFN_cuCtxPushCurrent_v4000, context_push),
    FUNCTION("cuCtxPopCurrent", 4000, PFN_cuCtxPopCurrent_v4000, context_pop),
    FUNCTION("cuCtxGetStreamPriorityRange", 5050, PFN_cuCtxGetStreamPriorityRange_v5050,
             stream_priority_range),
    FUNCTION("cuThreadExchangeStreamCaptureMode", 10010,
             PFN_cuThreadExchangeStreamCaptureMode_v10010, exchange_capture_mode),
    FUNCTION("cuModuleLoadData", 2000, PFN_cuModuleLoadData_v2000, module_load),
    FUNCTION("cuModuleUnload", 2000, PFN_cuModuleUnload_v2000, module_unload),
    FUNCTION("cuModuleGetFunction", 2000, PFN_cuModuleGetFunction_v2000, module_get_function),
    FUNCTION("cuFuncGetAttribute", 2020, PFN_cuFuncGetAttribute_v2020, function_get_attribute),
    FUNCTION("cuFuncSetAttribute", 9000, PFN_cuFuncSetAttribute_v9000, function_set_attribute),
    FUNCTION("cuStreamCreateWithPriority", 5050, PFN_cuStreamCreateWithPriority_v5050,
             stream_create),
    FUNCTION("cuStreamDestroy", 4000, PFN_cuStreamDestroy_v4000, stream_destroy),
    FUNCTION("cuStreamSynchronize", 2000, PFN_cuStreamSynchronize_v2000, stream_synchronize),
    FUNCTION("cuStreamWaitEvent", 3020, PFN_cuStreamWaitEvent_v3020, stream_wait_event),
    FUNCTION("cuStreamIsCapturing", 10000, PFN_cuStreamIsCapturing_v10000, stream_is_capturing),
    FUNCTION("cuStreamWriteValue32", 11070, PFN_cuStreamWriteValue32_v11070, stream_write_value),
    FUNCTION("cuEventCreate", 2000, PFN_cuEventCreate_v2000, event_create),
    FUNCTION("cuEventDestroy", 4000, PFN_cuEventDestroy_v4000, event_destroy),
    FUNCTION("cuEventRecord", 2000, PFN_cuEventRecord_v2000, event_record),
    FUNCTION("cuEventQuery", 2000, PFN_cuEventQuery_v2000, event_query),
    FUNCTION("cuEventElapsedTime", 2000, PFN_cuEventElapsedTime_v2000, event_elapsed_time),
    FUNCTION("cuMemAlloc", 3020, PFN_cuMemAlloc_v3020, mem_alloc),
    FUNCTION("cuMemFree", 3020, PFN_cuMemFree_v3020, mem_free),
    FUNCTION("cuMemcpyAsync", 4000, PFN_cuMemcpyAsync_v4000, mem_copy),
    FUNCTION("cuMemcpyBatchAsync", 12080, PFN_cuMemcpyBatchAsync_v12080, mem_copy_batch12),
#if CUDA_VERSION >= 13000
    FUNCTION("cuMemcpyBatchAsync", 13000, PFN_cuMemcpyBatchAsync_v13000, mem_copy_batch13),
#else
    {"cuMemcpyBatchAsync", 13000, reinterpret_cast<void*>(mem_copy_batch13)},
#endif
    FUNCTION("cuLaunchKernel", 4000, PFN_cuLaunchKernel_v4000, launch_kernel),
    FUNCTION("cuMemHostRegister", 6050, PFN_cuMemHostRegister_v6050, host_register),
    FUNCTION("cuMemHostUnregister", 4000, PFN_cuMemHostUnregister_v4000, host_unregister),
    FUNCTION("cuMemHostGetDevicePointer", 3020, PFN_cuMemHostGetDevicePointer_v3020,
             host_device_pointer),
};

}  // namespace
}  // namespace fake

// All else is hidden: each copy of the library that is loaded has a state of its own.
#pragma GCC visibility push(default)
extern "C" {

// The newest type that is not newer than `version` and the driver, as real ones find it.
CUresult cuGetProcAddress_v2(const char* symbol, void** function, int version, cuuint64_t,
                             CUdriverProcAddressQueryResult*) {
  *function = nullptr;
  if (std::strcmp(symbol, "cuMemcpyBatchAsync") == 0 && !state.batches) return CUDA_SUCCESS;
  for (const fake::Function& known : fake::kFunctions) {
    if (std::strcmp(symbol, known.name) == 0 &&
        known.version <= std::min(version, state.version)) {
      *function = known.address;
    }
  }
  return CUDA_SUCCESS;
}
}
#pragma GCC visibility pop
