// SPDX-License-Identifier: Apache-2.0
//
// A CUDA driver without a device: device memory is host memory, streams are threads. It checks what a
// real one would check of the mover's calls. Tests control it through the functions of control.hpp.
#include <cuda.h>
#include <cudaTypedefs.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "control.hpp"
#include "kernels.hpp"
#include "state.hpp"
#include "streams.hpp"

namespace fake {
namespace {

#define ENTER(...)                                                                    \
  const std::lock_guard lock(mutex);                                                  \
  if (const CUresult entered = enter(__VA_ARGS__); entered != CUDA_SUCCESS) return entered

CUresult get_error_name(CUresult, const char** name) {
  *name = "CUDA_ERROR_FAKE";
  return CUDA_SUCCESS;
}

CUresult get_error_string(CUresult, const char** text) {
  *text = "wanted by the test";
  return CUDA_SUCCESS;
}

CUresult driver_get_version(int* version) {
  *version = state.version;
  return CUDA_SUCCESS;
}

CUresult init(unsigned int) {
  ENTER("cuInit", false);
  return CUDA_SUCCESS;
}

CUresult device_get_count(int* count) {
  ENTER("cuDeviceGetCount", false);
  *count = state.devices;
  return CUDA_SUCCESS;
}

CUresult device_get(CUdevice* device, int ordinal) {
  ENTER("cuDeviceGet", false);
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult device_get_name(char* name, int bytes, CUdevice) {
  ENTER("cuDeviceGetName", false);
  std::snprintf(name, static_cast<std::size_t>(bytes), "Fake H0");
  return CUDA_SUCCESS;
}

CUresult device_get_pci_bus_id(char* id, int bytes, CUdevice device) {
  ENTER("cuDeviceGetPCIBusId", false);
  std::snprintf(id, static_cast<std::size_t>(bytes), "0000:%02X:00.0", 0xA0 + device);
  return CUDA_SUCCESS;
}

CUresult device_get_attribute(int* value, CUdevice_attribute attribute, CUdevice) {
  ENTER("cuDeviceGetAttribute", false);
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      *value = state.major;
      break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
      *value = 132;
      break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
      *value = 227 * 1024;
      break;
    default:
      *value = 0;
  }
  return CUDA_SUCCESS;
}

CUresult primary_context_retain(CUcontext* context, CUdevice device) {
  ENTER("cuDevicePrimaryCtxRetain", false);
  state.contexts += 1;
  *context = reinterpret_cast<CUcontext>(static_cast<std::uintptr_t>(device) + 1);
  return CUDA_SUCCESS;
}

CUresult primary_context_release(CUdevice) {
  const std::lock_guard lock(mutex);
  state.contexts -= 1;
  if (state.contexts == 0) {  // the context ends, and with it what it holds
    state.modules = 0;
    for (void* memory : state.memory) {
      std::free(memory);
    }
    state.memory.clear();
  }
  return enter("cuDevicePrimaryCtxRelease", false);
}

CUresult context_push(CUcontext context) {
  ENTER("cuCtxPushCurrent", false);
  current.push_back(context);
  return CUDA_SUCCESS;
}

CUresult context_pop(CUcontext* context) {
  const std::lock_guard lock(mutex);
  *context = current.back();
  current.pop_back();
  return enter("cuCtxPopCurrent", false);
}

CUresult stream_priority_range(int* lowest, int* highest) {
  ENTER("cuCtxGetStreamPriorityRange");
  *lowest = 0;
  *highest = -5;
  return CUDA_SUCCESS;
}

CUresult exchange_capture_mode(CUstreamCaptureMode* mode) {
  std::swap(*mode, capture_mode);
  return CUDA_SUCCESS;
}

CUresult module_load(CUmodule* module, const void*) {
  ENTER("cuModuleLoadData");
  state.modules += 1;
  *module = reinterpret_cast<CUmodule>(&state);
  return CUDA_SUCCESS;
}

CUresult module_unload(CUmodule) {
  const std::lock_guard lock(mutex);
  state.modules -= 1;
  return enter("cuModuleUnload");
}

CUresult module_get_function(CUfunction* function, CUmodule, const char* name) {
  ENTER("cuModuleGetFunction");
  static std::set<std::string>& names = *new std::set<std::string>;
  *function = reinterpret_cast<CUfunction>(
      const_cast<std::string*>(&*names.insert(name).first));
  return CUDA_SUCCESS;
}

CUresult function_set_attribute(CUfunction, CUfunction_attribute, int) {
  ENTER("cuFuncSetAttribute");
  return CUDA_SUCCESS;
}

CUresult stream_create(CUstream* handle, unsigned int flags, int) {
  ENTER("cuStreamCreateWithPriority");
  if (flags != CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
  auto stream = std::make_unique<Stream>();
  *handle = reinterpret_cast<CUstream>(stream.get());
  state.streams[*handle] = std::move(stream);
  return CUDA_SUCCESS;
}

CUresult stream_destroy(CUstream handle) {
  std::unique_ptr<Stream> stream;  // its thread needs the lock to end
  const std::lock_guard lock(mutex);
  const auto found = state.streams.find(handle);
  if (found != state.streams.end()) {
    stream = std::move(found->second);
    state.streams.erase(found);
  }
  return enter("cuStreamDestroy");
}

CUresult stream_synchronize(CUstream handle) {
  std::unique_lock lock(mutex);
  if (const CUresult result = enter("cuStreamSynchronize"); result != CUDA_SUCCESS) return result;
  Stream* stream = find_stream(handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  changed.wait(lock, [&] { return stream->idle() || sticky; });
  return sticky;
}

CUresult stream_wait_event(CUstream handle, CUevent waited, unsigned int) {
  ENTER("cuStreamWaitEvent");
  Stream* stream = find_stream(handle);
  const std::shared_ptr<Event> event = find_event(waited);
  if (stream == nullptr || event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  stream->wait_for(event);
  return CUDA_SUCCESS;
}

// Without its fence the word may be seen before the bytes of earlier copies: the fake writes it first.
CUresult stream_write_value(CUstream handle, CUdeviceptr address, cuuint32_t value,
                            unsigned int flags) {
  ENTER("cuStreamWriteValue32");
  Stream* stream = find_stream(handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  const std::uint64_t word = to_host(address);
  if (overlapping(word, 4) == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const auto write = [word, value] {
    __atomic_store_n(reinterpret_cast<std::uint32_t*>(word), value, __ATOMIC_RELEASE);
    return CUDA_SUCCESS;
  };
  if (flags != CU_STREAM_WRITE_VALUE_DEFAULT) return write();
  stream->enqueue(write);
  return CUDA_SUCCESS;
}

CUresult event_create(CUevent* handle, unsigned int flags) {
  ENTER("cuEventCreate");
  auto event = std::make_shared<Event>();
  event->timing = (flags & CU_EVENT_DISABLE_TIMING) == 0;
  *handle = reinterpret_cast<CUevent>(event.get());
  state.events[*handle] = std::move(event);
  return CUDA_SUCCESS;
}

CUresult event_destroy(CUevent handle) {
  const std::lock_guard lock(mutex);
  state.events.erase(handle);
  return enter("cuEventDestroy");
}

CUresult event_record(CUevent handle, CUstream on) {
  ENTER("cuEventRecord");
  Stream* stream = find_stream(on);
  const std::shared_ptr<Event> event = find_event(handle);
  if (stream == nullptr || event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  stream->record(event);
  return CUDA_SUCCESS;
}

CUresult event_query(CUevent handle) {
  ENTER("cuEventQuery");
  const std::shared_ptr<Event> event = find_event(handle);
  if (event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  return event->reached >= event->recorded ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult event_elapsed_time(float* milliseconds, CUevent from, CUevent to) {
  ENTER("cuEventElapsedTime");
  const std::shared_ptr<Event> begin = find_event(from);
  const std::shared_ptr<Event> end = find_event(to);
  if (begin == nullptr || end == nullptr || !begin->timing || !end->timing) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  if (begin->reached < begin->recorded || end->reached < end->recorded) {
    return CUDA_ERROR_NOT_READY;
  }
  *milliseconds = std::chrono::duration<float, std::milli>(end->time - begin->time).count();
  return CUDA_SUCCESS;
}

CUresult mem_alloc(CUdeviceptr* address, std::size_t bytes) {
  ENTER("cuMemAlloc");
  void* memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  state.memory.insert(memory);
  *address = reinterpret_cast<CUdeviceptr>(memory);
  return CUDA_SUCCESS;
}

// A real driver first waits for what may still use the memory. Here a stream may be held by a test,
// so the memory is kept instead: it is little.
CUresult mem_free(CUdeviceptr address) {
  const std::lock_guard lock(mutex);
  state.memory.erase(reinterpret_cast<void*>(address));
  return enter("cuMemFree");
}

struct Copy {
  std::uint64_t destination, source;
  std::size_t bytes;
};

// Copies of one call have no order among them: the fake takes the last one first.
CUresult enqueue_copies(CUstream handle, std::vector<Copy> copies, std::size_t* failed) {
  Stream* stream = find_stream(handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  for (std::size_t i = 0; i < copies.size(); ++i) {
    Copy& copy = copies[i];
    copy.destination = to_host(copy.destination);
    copy.source = to_host(copy.source);
    if (!within_a_piece(copy.destination, copy.bytes) || !within_a_piece(copy.source, copy.bytes)) {
      *failed = i;
      return CUDA_ERROR_INVALID_VALUE;
    }
  }
  stream->enqueue([copies = std::move(copies)] {
    if (const CUresult result = run_fails(); result != CUDA_SUCCESS) return result;
    std::for_each(copies.rbegin(), copies.rend(), [](const Copy& copy) {
      std::memcpy(reinterpret_cast<void*>(copy.destination),
                  reinterpret_cast<const void*>(copy.source), copy.bytes);
    });
    return CUDA_SUCCESS;
  });
  return CUDA_SUCCESS;
}

CUresult mem_copy(CUdeviceptr destination, CUdeviceptr source, std::size_t bytes, CUstream stream) {
  ENTER("cuMemcpyAsync");
  std::size_t failed = 0;
  return enqueue_copies(stream, {{destination, source, bytes}}, &failed);
}

CUresult mem_copy_batch12(CUdeviceptr* destinations, CUdeviceptr* sources, std::size_t* sizes,
                          std::size_t count, CUmemcpyAttributes* attributes, std::size_t* first,
                          std::size_t n_attributes, std::size_t* failed, CUstream stream) {
  ENTER("cuMemcpyBatchAsync");
  if (count == 0 || n_attributes != 1 || first[0] != 0 ||
      attributes[0].srcAccessOrder != CU_MEMCPY_SRC_ACCESS_ORDER_STREAM) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  std::vector<Copy> copies(count);
  for (std::size_t i = 0; i < count; ++i) {
    copies[i] = {destinations[i], sources[i], sizes[i]};
  }
  return enqueue_copies(stream, std::move(copies), failed);
}

CUresult mem_copy_batch13(CUdeviceptr* destinations, CUdeviceptr* sources, std::size_t* sizes,
                          std::size_t count, CUmemcpyAttributes* attributes, std::size_t* first,
                          std::size_t n_attributes, CUstream stream) {
  std::size_t failed = 0;
  return mem_copy_batch12(destinations, sources, sizes, count, attributes, first, n_attributes,
                          &failed, stream);
}

CUresult launch_kernel(CUfunction function, unsigned int blocks, unsigned int, unsigned int,
                       unsigned int threads, unsigned int, unsigned int, unsigned int,
                       CUstream handle, void** parameters, void**) {
  ENTER("cuLaunchKernel");
  const std::string name = *reinterpret_cast<std::string*>(function);
  state.calls[name] += 1;
  Stream* stream = find_stream(handle);
  if (stream == nullptr || blocks == 0) return CUDA_ERROR_INVALID_VALUE;
  CopyBatch batch = *static_cast<CopyBatch*>(parameters[0]);
  batch.arena = to_host(batch.arena);
  const bool idle = state.idle_kernels.contains(name);
  stream->enqueue([name, batch, blocks, threads, idle] {
    const CUresult result = run_fails();
    if (idle || result != CUDA_SUCCESS) return result;
    return run_kernel(name, batch, blocks, threads);
  });
  return CUDA_SUCCESS;
}

CUresult host_register(void* memory, std::size_t bytes, unsigned int flags) {
  ENTER("cuMemHostRegister");
  if (flags != (CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const auto address = reinterpret_cast<std::uint64_t>(memory);
  if (overlapping(address, bytes) != nullptr) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  state.registered[address] = bytes;
  return CUDA_SUCCESS;
}

CUresult host_unregister(void* memory) {
  const std::lock_guard lock(mutex);
  const bool known = state.registered.erase(reinterpret_cast<std::uint64_t>(memory)) != 0;
  const CUresult result = enter("cuMemHostUnregister");
  return known ? result : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

CUresult host_device_pointer(CUdeviceptr* address, void* memory, unsigned int) {
  ENTER("cuMemHostGetDevicePointer");
  *address = reinterpret_cast<std::uint64_t>(memory) + state.alias;
  return CUDA_SUCCESS;
}

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
    FUNCTION("cuFuncSetAttribute", 9000, PFN_cuFuncSetAttribute_v9000, function_set_attribute),
    FUNCTION("cuStreamCreateWithPriority", 5050, PFN_cuStreamCreateWithPriority_v5050,
             stream_create),
    FUNCTION("cuStreamDestroy", 4000, PFN_cuStreamDestroy_v4000, stream_destroy),
    FUNCTION("cuStreamSynchronize", 2000, PFN_cuStreamSynchronize_v2000, stream_synchronize),
    FUNCTION("cuStreamWaitEvent", 3020, PFN_cuStreamWaitEvent_v3020, stream_wait_event),
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

// The newest type that is not newer than `version`, as the real one finds it.
CUresult cuGetProcAddress_v2(const char* symbol, void** function, int version, cuuint64_t,
                             CUdriverProcAddressQueryResult*) {
  *function = nullptr;
  if (version > state.version) return CUDA_ERROR_INVALID_VALUE;
  if (std::strcmp(symbol, "cuMemcpyBatchAsync") == 0 && !state.batches) return CUDA_SUCCESS;
  for (const fake::Function& known : fake::kFunctions) {
    if (std::strcmp(symbol, known.name) == 0 && known.version <= version) {
      *function = known.address;
    }
  }
  return CUDA_SUCCESS;
}
}
#pragma GCC visibility pop
