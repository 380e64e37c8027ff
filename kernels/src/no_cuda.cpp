// SPDX-License-Identifier: Apache-2.0
//
// The CUDA part of the C ABI in a library built without it.
#include "c_api.hpp"
#include "flexkv/mover.h"

namespace {

void refuse(char* err, std::size_t err_len) noexcept {
  flexkv::write_message(err, err_len,
                        "flexkv-kernels was built without CUDA, because the build found no nvcc of "
                        "CUDA 12.8 or newer that works: install one, set CUDA_HOME or PATH, and "
                        "reinstall flexkv-kernels from source");
}

}  // namespace

int fkv_cuda_devices(const char*, char* err, size_t err_len) {
  refuse(err, err_len);
  return FKV_EINVAL;
}

int fkv_cuda_describe(const char*, int32_t, fkv_cuda_device*, char* err, size_t err_len) {
  refuse(err, err_len);
  return FKV_EINVAL;
}

fkv_mover* fkv_cuda_mover_create(const fkv_layout*, const fkv_cuda_options*, char* err,
                                 size_t err_len) {
  refuse(err, err_len);
  return nullptr;
}

uint64_t fkv_cuda_alloc(const char*, int32_t, uint64_t, char* err, size_t err_len) {
  refuse(err, err_len);
  return 0;
}

void fkv_cuda_free(uint64_t) {}
