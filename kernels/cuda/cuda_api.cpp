// SPDX-License-Identifier: Apache-2.0
//
// The CUDA part of the C ABI; src/no_cuda.cpp.in stands in for a build without it.
#include <memory>
#include <new>
#include <string>
#include <system_error>

#include "c_api.hpp"
#include "cuda_mover.hpp"
#include "cuda_tuning.hpp"
#include "device.hpp"
#include "device_memory.hpp"
#include "driver.hpp"
#include "flexkv/mover.h"
#include "layout.hpp"

namespace {

using flexkv::InvalidArgument;
using flexkv::write_message;
using flexkv::cuda::load_driver;

// Runs `call`; if it throws, writes the message and returns `failed`.
template <typename Result, typename Call>
Result guarded(Result failed, char* err, std::size_t err_len, const Call& call) {
  try {
    return call();
  } catch (const std::bad_alloc&) {
    write_message(err, err_len, "no memory");
  } catch (const std::runtime_error& error) {  // NoDriver, DriverError, of a thread
    write_message(err, err_len, error.what());
  } catch (const InvalidArgument& error) {
    write_message(err, err_len, error.what());
  }
  return failed;
}

}  // namespace

int fkv_cuda_devices(const char* driver, char* err, size_t err_len) {
  return guarded(static_cast<int>(FKV_EINVAL), err, err_len, [&] {
    const std::int32_t count = flexkv::cuda::device_count(load_driver(driver));
    if (count == 0) {
      throw InvalidArgument("the NVIDIA driver shows this process no device");
    }
    return static_cast<int>(count);
  });
}

int fkv_cuda_describe(const char* driver, int32_t device, fkv_cuda_device* out, char* err,
                      size_t err_len) {
  return guarded(static_cast<int>(FKV_EINVAL), err, err_len, [&] {
    *out = flexkv::cuda::describe_device(load_driver(driver), device);
    return 0;
  });
}

fkv_mover* fkv_cuda_mover_create(const fkv_layout* layout, const fkv_cuda_options* options,
                                 char* err, size_t err_len) {
  return guarded<fkv_mover*>(nullptr, err, err_len, [&] {
    if (layout == nullptr || options == nullptr) {
      throw InvalidArgument("layout or options is a null pointer");
    }
    auto mover = std::make_unique<flexkv::cuda::CudaMover>(flexkv::Layout(*layout),
                                                           flexkv::cuda::tune(*options));
    mover->start(load_driver(options->driver), options->device);
    return new fkv_mover{std::move(mover)};
  });
}

int fkv_cuda_mover_force(fkv_mover* mover, uint32_t mode, uint32_t thread_blocks,
                         uint64_t ring_bytes, char* err, size_t err_len) {
  try {
    auto* cuda = dynamic_cast<flexkv::cuda::CudaMover*>(mover->mover.get());
    if (cuda == nullptr) {
      throw InvalidArgument("it is no CUDA mover");
    }
    cuda->force(flexkv::cuda::forced_way(mode, thread_blocks), ring_bytes);
    return 0;
  } catch (const InvalidArgument& error) {
    write_message(err, err_len, error.what());
    return FKV_EINVAL;
  } catch (const flexkv::Closed& error) {
    write_message(err, err_len, error.what());
    return FKV_ECLOSED;
  }
}

uint64_t fkv_cuda_mover_ring_bytes(const fkv_mover* mover) {
  const auto* cuda = dynamic_cast<const flexkv::cuda::CudaMover*>(mover->mover.get());
  return cuda == nullptr ? 0 : cuda->ring_bytes();
}

uint64_t fkv_cuda_alloc(const char* driver, int32_t device, uint64_t bytes, char* err,
                        size_t err_len) {
  return guarded(std::uint64_t{0}, err, err_len,
                 [&] { return flexkv::cuda::allocate(load_driver(driver), device, bytes); });
}

void fkv_cuda_free(uint64_t address) { flexkv::cuda::release(address); }
