// SPDX-License-Identifier: Apache-2.0
#include "device.hpp"

#include <map>
#include <mutex>
#include <utility>

#include "fatbin.hpp"
#include "mover.hpp"

namespace flexkv::cuda {
namespace {

// The first compute capability with bulk copies.
constexpr int kBulkMajor = 9;

CUdevice find_device(const Driver& driver, std::int32_t ordinal) {
  const std::int32_t count = device_count(driver);
  if (ordinal < 0 || ordinal >= count) {
    throw InvalidArgument("device is " + std::to_string(ordinal) + ", the driver has " +
                          std::to_string(count) + " CUDA devices, numbered from 0");
  }
  CUdevice device = 0;
  driver.check(driver.cuDeviceGet(&device, ordinal), "cuDeviceGet");
  return device;
}

bool is_wrong_stream(CUresult result) {
  return result == CUDA_ERROR_INVALID_HANDLE || result == CUDA_ERROR_INVALID_VALUE ||
         result == CUDA_ERROR_INVALID_CONTEXT || result == CUDA_ERROR_CONTEXT_IS_DESTROYED ||
         result == CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
}

}  // namespace

void check_stream(const Driver& driver, CUresult result, const std::string& name,
                  std::uint64_t stream, const std::string& call) {
  if (is_wrong_stream(result)) {
    throw InvalidArgument(name + " is " + std::to_string(stream) + ", no stream of this device: " +
                          driver.describe(result, call));
  }
  driver.check(result, call + " on the caller's stream");
}

void check_not_captured(const Driver& driver, const std::string& name, std::uint64_t stream) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  const CUresult result =
      driver.cuStreamIsCapturing(reinterpret_cast<CUstream>(stream), &status);
  // The legacy stream says so while another that would wait for it is captured.
  if (result == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT || status != CU_STREAM_CAPTURE_STATUS_NONE) {
    throw InvalidArgument(name + " is " + std::to_string(stream) +
                          ", a stream that is captured into a graph");
  }
  check_stream(driver, result, name, stream, "cuStreamIsCapturing");
}

std::int32_t device_count(const Driver& driver) {
  int count = 0;
  driver.check(driver.cuDeviceGetCount(&count), "cuDeviceGetCount");
  return count;
}

fkv_cuda_device describe_device(const Driver& driver, std::int32_t ordinal) {
  const CUdevice device = find_device(driver, ordinal);
  fkv_cuda_device info{};
  driver.check(driver.cuDeviceGetName(info.name, sizeof(info.name), device), "cuDeviceGetName");
  driver.check(driver.cuDeviceGetPCIBusId(info.pci_bus_id, sizeof(info.pci_bus_id), device),
               "cuDeviceGetPCIBusId");
  const auto attribute = [&](CUdevice_attribute name) {
    int value = 0;
    driver.check(driver.cuDeviceGetAttribute(&value, name, device), "cuDeviceGetAttribute");
    return value;
  };
  info.major = attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
  info.minor = attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
  info.multiprocessors = attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
  info.driver_version = driver.version;
  return info;
}

std::shared_ptr<Device> Device::open(const Driver& driver, std::int32_t ordinal) {
  static std::mutex& mutex = *new std::mutex;
  static auto& devices =
      *new std::map<std::pair<const Driver*, std::int32_t>, std::weak_ptr<Device>>;
  const std::lock_guard lock(mutex);
  std::weak_ptr<Device>& known = devices[{&driver, ordinal}];
  std::shared_ptr<Device> device = known.lock();
  if (device == nullptr) {
    device = std::make_shared<Device>(driver, ordinal);
    known = device;
  }
  return device;
}

Device::Device(const Driver& driver, std::int32_t ordinal)
    : driver_(driver), device_(find_device(driver, ordinal)) {
  driver_.check(driver_.cuDevicePrimaryCtxRetain(&context_, device_), "cuDevicePrimaryCtxRetain");
  try {
    load_kernels();
  } catch (...) {
    driver_.cuDevicePrimaryCtxRelease(device_);
    throw;
  }
}

Device::~Device() {
  try {
    const CurrentDevice current(*this);
    driver_.cuModuleUnload(module_);
  } catch (const DriverError&) {
    // The context has failed: nothing is left to unload.
  }
  driver_.cuDevicePrimaryCtxRelease(device_);
}

// Looking a kernel up makes drivers that load lazily load it now, when nothing waits for it.
void Device::load_kernels() {
  const CurrentDevice current(*this);
  const CUresult loaded = driver_.cuModuleLoadData(&module_, fkv_fatbin);
  if (loaded != CUDA_SUCCESS && driver_.version < CUDA_VERSION) {
    throw InvalidArgument(
        "the NVIDIA driver, of CUDA " + version_text(driver_.version) +
        ", does not take copy kernels made by nvcc " + version_text(CUDA_VERSION) +
        ": update the driver, or rebuild flexkv-kernels with an nvcc from 12.8 to " +
        version_text(driver_.version) + " in CUDA_HOME. It says: " +
        driver_.describe(loaded, "cuModuleLoadData"));
  }
  driver_.check(loaded, "cuModuleLoadData of the copy kernels");
  for (std::size_t i = 0; i < kCopyKernels.size(); ++i) {
    driver_.check(driver_.cuModuleGetFunction(&copies_[i], module_, kCopyKernels[i].name),
                  "cuModuleGetFunction");
  }
  if (attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) < kBulkMajor ||
      attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN) <
          static_cast<int>(kBulkSharedBytes + kBulkReservedBytes)) {
    return;
  }
  CUfunction bulk = nullptr;
  driver_.check(driver_.cuModuleGetFunction(&bulk, module_, kBulkKernel), "cuModuleGetFunction");
  int compiled_for = 0;
  driver_.check(driver_.cuFuncGetAttribute(&compiled_for, CU_FUNC_ATTRIBUTE_PTX_VERSION, bulk),
                "cuFuncGetAttribute");
  if (compiled_for < 10 * kBulkMajor) {
    return;  // of PTX for older processors, in which the kernel is empty
  }
  driver_.check(driver_.cuFuncSetAttribute(bulk, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                           static_cast<int>(kBulkSharedBytes)),
                "cuFuncSetAttribute");
  bulk_ = bulk;
}

int Device::attribute(CUdevice_attribute name) const {
  int value = 0;
  driver_.check(driver_.cuDeviceGetAttribute(&value, name, device_), "cuDeviceGetAttribute");
  return value;
}

CUfunction Device::copy_kernel(std::uint32_t width) const noexcept {
  for (std::size_t i = 0; i < kCopyKernels.size(); ++i) {
    if (kCopyKernels[i].width == width) {
      return copies_[i];
    }
  }
  return copies_.back();
}

CurrentDevice::CurrentDevice(const Device& device) : driver_(device.driver()) {
  driver_.check(driver_.cuCtxPushCurrent(device.context()), "cuCtxPushCurrent");
  if (driver_.cuThreadExchangeStreamCaptureMode(&mode_) != CUDA_SUCCESS) {
    mode_ = CU_STREAM_CAPTURE_MODE_GLOBAL;  // a thread's mode unless it was changed
  }
}

CurrentDevice::~CurrentDevice() {
  driver_.cuThreadExchangeStreamCaptureMode(&mode_);
  CUcontext popped = nullptr;
  driver_.cuCtxPopCurrent(&popped);
}

}  // namespace flexkv::cuda
