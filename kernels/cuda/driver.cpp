// SPDX-License-Identifier: Apache-2.0
#include "driver.hpp"

#include <dlfcn.h>

#include <map>
#include <memory>
#include <mutex>
#include <type_traits>

namespace flexkv::cuda {
namespace {

constexpr const char* kDefaultPath = "libcuda.so.1";

// cuGetProcAddress in the form used here, and the newest of the functions that are always needed,
// are of CUDA 12.0.
constexpr int kMinVersion = 12000;

#if CUDA_VERSION >= 13000
static_assert(std::is_same_v<BatchCopy13, PFN_cuMemcpyBatchAsync_v13000>);
#endif

// Looks functions up by name and by the version of CUDA that introduced their type.
class Lookup {
 public:
  Lookup(void* library, const std::string& path) : path_(path) {
    get_ = reinterpret_cast<PFN_cuGetProcAddress_v12000>(dlsym(library, "cuGetProcAddress_v2"));
    if (get_ == nullptr) {
      throw NoDriver("the NVIDIA driver " + path_ + " is older than CUDA " +
                     version_text(kMinVersion) + ", which FlexKV needs: update the driver");
    }
  }

  template <typename Function>
  void optional(Function& function, const char* name, int version) const {
    void* found = nullptr;
    const CUresult result =
        get_(name, &found, version, CU_GET_PROC_ADDRESS_LEGACY_STREAM, nullptr);
    function = result == CUDA_SUCCESS ? reinterpret_cast<Function>(found) : nullptr;
  }

  template <typename Function>
  void required(Function& function, const char* name, int version) const {
    optional(function, name, version);
    if (function == nullptr) {
      throw NoDriver("the NVIDIA driver " + path_ + " has no " + name + " of CUDA " +
                     version_text(version) + ", which FlexKV needs: update the driver");
    }
  }

 private:
  std::string path_;
  PFN_cuGetProcAddress_v12000 get_;
};

void look_up(Driver& driver, const Lookup& lookup) {
#define FKV_FIND(name, version) lookup.required(driver.name, #name, version)
  FKV_FIND(cuGetErrorName, 6000);
  FKV_FIND(cuGetErrorString, 6000);
  FKV_FIND(cuInit, 2000);
  FKV_FIND(cuDeviceGetCount, 2000);
  FKV_FIND(cuDeviceGet, 2000);
  FKV_FIND(cuDeviceGetName, 2000);
  FKV_FIND(cuDeviceGetPCIBusId, 4010);
  FKV_FIND(cuDeviceGetAttribute, 2000);
  FKV_FIND(cuDevicePrimaryCtxRetain, 7000);
  FKV_FIND(cuDevicePrimaryCtxRelease, 11000);
  FKV_FIND(cuCtxPushCurrent, 4000);
  FKV_FIND(cuCtxPopCurrent, 4000);
  FKV_FIND(cuCtxGetStreamPriorityRange, 5050);
  FKV_FIND(cuThreadExchangeStreamCaptureMode, 10010);
  FKV_FIND(cuModuleLoadData, 2000);
  FKV_FIND(cuModuleUnload, 2000);
  FKV_FIND(cuModuleGetFunction, 2000);
  FKV_FIND(cuFuncGetAttribute, 2020);
  FKV_FIND(cuFuncSetAttribute, 9000);
  FKV_FIND(cuStreamCreateWithPriority, 5050);
  FKV_FIND(cuStreamDestroy, 4000);
  FKV_FIND(cuStreamSynchronize, 2000);
  FKV_FIND(cuStreamWaitEvent, 3020);
  FKV_FIND(cuStreamIsCapturing, 10000);
  FKV_FIND(cuStreamWriteValue32, 11070);
  FKV_FIND(cuEventCreate, 2000);
  FKV_FIND(cuEventDestroy, 4000);
  FKV_FIND(cuEventRecord, 2000);
  FKV_FIND(cuEventQuery, 2000);
  FKV_FIND(cuEventElapsedTime, 2000);
  FKV_FIND(cuMemAlloc, 3020);
  FKV_FIND(cuMemFree, 3020);
  FKV_FIND(cuMemcpyAsync, 4000);
  FKV_FIND(cuLaunchKernel, 4000);
  FKV_FIND(cuMemHostRegister, 6050);
  FKV_FIND(cuMemHostUnregister, 4000);
  FKV_FIND(cuMemHostGetDevicePointer, 3020);
#undef FKV_FIND
  // One name, two types. A driver that is asked for a version newer than itself may give its own newest.
  if (driver.version >= 13000) {
    lookup.optional(driver.cuMemcpyBatchAsync13, "cuMemcpyBatchAsync", 13000);
  }
  if (driver.cuMemcpyBatchAsync13 == nullptr && driver.version >= 12080) {
    lookup.optional(driver.cuMemcpyBatchAsync12, "cuMemcpyBatchAsync", 12080);
  }
}

std::unique_ptr<Driver> open_driver(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw NoDriver(std::string("no NVIDIA driver: ") + dlerror());
  }
  const Lookup lookup(library, path);
  auto driver = std::make_unique<Driver>();
  PFN_cuDriverGetVersion_v2020 get_version = nullptr;
  lookup.required(get_version, "cuDriverGetVersion", 2020);
  if (get_version(&driver->version) != CUDA_SUCCESS || driver->version < kMinVersion) {
    throw NoDriver("the NVIDIA driver " + path + " is of CUDA " + version_text(driver->version) +
                   ", FlexKV needs " + version_text(kMinVersion) + " or newer: update the driver");
  }
  look_up(*driver, lookup);
  const CUresult result = driver->cuInit(0);
  if (result != CUDA_SUCCESS) {
    throw NoDriver("the NVIDIA driver " + path + " does not start: " +
                   driver->describe(result, "cuInit"));
  }
  return driver;
}

}  // namespace

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

std::string Driver::describe(CUresult result, const std::string& doing) const {
  const char* name = nullptr;
  const char* meaning = nullptr;
  if (cuGetErrorName(result, &name) != CUDA_SUCCESS || name == nullptr) {
    name = "unknown CUDA error";
  }
  if (cuGetErrorString(result, &meaning) != CUDA_SUCCESS || meaning == nullptr) {
    meaning = "no description";
  }
  return std::string(name) + " (" + std::to_string(static_cast<int>(result)) + "): " + meaning +
         ", while doing " + doing;
}

const Driver& load_driver(const char* path) {
  // Never destroyed: see Driver.
  static std::mutex& mutex = *new std::mutex;
  static auto& drivers = *new std::map<std::string, std::unique_ptr<Driver>>;
  const std::string key = path == nullptr ? kDefaultPath : path;
  const std::lock_guard lock(mutex);
  auto found = drivers.find(key);
  if (found == drivers.end()) {
    found = drivers.emplace(key, open_driver(key)).first;
  }
  return *found->second;
}

}  // namespace flexkv::cuda
