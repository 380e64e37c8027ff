// SPDX-License-Identifier: Apache-2.0
//
// The fake driver's functions about devices, contexts and modules.
#pragma once

#include <cuda.h>

#include <cstdio>
#include <cstdlib>
#include <set>
#include <string>

#include "state.hpp"

namespace fake {

// As of an H100: of streams, and of a thread block.
constexpr int kLowestPriority = 0;
constexpr int kHighestPriority = -5;
constexpr int kMaxSharedBytes = 227 * 1024;

#define ENTER(...)                                                                    \
  const std::lock_guard lock(mutex);                                                  \
  if (const CUresult entered = enter(__VA_ARGS__); entered != CUDA_SUCCESS) return entered

inline CUresult get_error_name(CUresult, const char** name) {
  *name = "CUDA_ERROR_FAKE";
  return CUDA_SUCCESS;
}

inline CUresult get_error_string(CUresult, const char** text) {
  *text = "wanted by the test";
  return CUDA_SUCCESS;
}

inline CUresult driver_get_version(int* version) {
  *version = state.version;
  return CUDA_SUCCESS;
}

inline CUresult init(unsigned int) {
  ENTER("cuInit", false);
  return CUDA_SUCCESS;
}

inline CUresult device_get_count(int* count) {
  ENTER("cuDeviceGetCount", false);
  *count = state.devices;
  return CUDA_SUCCESS;
}

inline CUresult device_get(CUdevice* device, int ordinal) {
  ENTER("cuDeviceGet", false);
  *device = ordinal;
  return CUDA_SUCCESS;
}

inline CUresult device_get_name(char* name, int bytes, CUdevice) {
  ENTER("cuDeviceGetName", false);
  std::snprintf(name, static_cast<std::size_t>(bytes), "Fake H0");
  return CUDA_SUCCESS;
}

inline CUresult device_get_pci_bus_id(char* id, int bytes, CUdevice device) {
  ENTER("cuDeviceGetPCIBusId", false);
  std::snprintf(id, static_cast<std::size_t>(bytes), "0000:%02X:00.0", 0xA0 + device);
  return CUDA_SUCCESS;
}

inline CUresult device_get_attribute(int* value, CUdevice_attribute attribute, CUdevice) {
  ENTER("cuDeviceGetAttribute", false);
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      *value = state.major;
      break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
      *value = 132;
      break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
      *value = kMaxSharedBytes;
      break;
    default:
      *value = 0;
  }
  return CUDA_SUCCESS;
}

inline CUresult primary_context_retain(CUcontext* context, CUdevice device) {
  ENTER("cuDevicePrimaryCtxRetain", false);
  state.contexts += 1;
  *context = reinterpret_cast<CUcontext>(static_cast<std::uintptr_t>(device) + 1);
  return CUDA_SUCCESS;
}

inline CUresult primary_context_release(CUdevice) {
  const std::lock_guard lock(mutex);
  state.contexts -= 1;
  if (state.contexts == 0) {  // the context ends, and with it what it holds
    state.modules = 0;
    for (const auto& [address, bytes] : state.memory) {
      std::free(reinterpret_cast<void*>(address));
    }
    state.memory.clear();
  }
  return enter("cuDevicePrimaryCtxRelease", false);
}

inline CUresult context_push(CUcontext context) {
  ENTER("cuCtxPushCurrent", false);
  current.push_back(context);
  return CUDA_SUCCESS;
}

inline CUresult context_pop(CUcontext* context) {
  const std::lock_guard lock(mutex);
  *context = current.back();
  current.pop_back();
  return enter("cuCtxPopCurrent", false);
}

inline CUresult stream_priority_range(int* lowest, int* highest) {
  ENTER("cuCtxGetStreamPriorityRange");
  *lowest = kLowestPriority;
  *highest = kHighestPriority;
  return CUDA_SUCCESS;
}

inline CUresult exchange_capture_mode(CUstreamCaptureMode* mode) {
  std::swap(*mode, capture_mode);
  return CUDA_SUCCESS;
}

inline CUresult module_load(CUmodule* module, const void*) {
  ENTER("cuModuleLoadData");
  state.modules += 1;
  *module = reinterpret_cast<CUmodule>(&state);
  return CUDA_SUCCESS;
}

inline CUresult module_unload(CUmodule) {
  const std::lock_guard lock(mutex);
  state.modules -= 1;
  return enter("cuModuleUnload");
}

inline CUresult module_get_function(CUfunction* function, CUmodule, const char* name) {
  ENTER("cuModuleGetFunction");
  static std::set<std::string>& names = *new std::set<std::string>;
  *function = reinterpret_cast<CUfunction>(
      const_cast<std::string*>(&*names.insert(name).first));
  return CUDA_SUCCESS;
}

inline const std::string& name_of(CUfunction function) {
  return *reinterpret_cast<const std::string*>(function);
}

inline CUresult function_get_attribute(int* value, CUfunction_attribute name, CUfunction) {
  ENTER("cuFuncGetAttribute");
  if (name != CU_FUNC_ATTRIBUTE_PTX_VERSION) return CUDA_ERROR_INVALID_VALUE;
  *value = state.compiled_for != 0 ? state.compiled_for : 10 * state.major;
  return CUDA_SUCCESS;
}

inline CUresult function_set_attribute(CUfunction function, CUfunction_attribute name, int value) {
  ENTER("cuFuncSetAttribute");
  if (name != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES || value > kMaxSharedBytes) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  state.shared_limits[name_of(function)] = static_cast<std::uint32_t>(value);
  return CUDA_SUCCESS;
}

}  // namespace fake
