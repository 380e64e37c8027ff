// SPDX-License-Identifier: Apache-2.0
#include "driver_batch.hpp"

#include <string>
#include <utility>

namespace flexkv::cuda {

void DriverBatch::add(CUdeviceptr destination, CUdeviceptr source, std::size_t bytes) noexcept {
  destinations_[count_] = destination;
  sources_[count_] = source;
  sizes_[count_] = bytes;
  count_ += 1;
}

void DriverBatch::enqueue(CUstream stream) {
  const std::size_t count = std::exchange(count_, 0);
  if (count != 0) {
    call(count, stream);
  }
}

void DriverBatch::call(std::size_t count, CUstream stream) {
  CUmemcpyAttributes attributes{};
  attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
  attributes.flags = CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE;
  std::size_t first = 0;
  if (driver_.cuMemcpyBatchAsync13 != nullptr) {
    driver_.check(driver_.cuMemcpyBatchAsync13(destinations_.data(), sources_.data(), sizes_.data(),
                                               count, &attributes, &first, 1, stream),
                  "cuMemcpyBatchAsync");
  } else if (driver_.cuMemcpyBatchAsync12 != nullptr) {
    std::size_t failed = count;
    const CUresult result =
        driver_.cuMemcpyBatchAsync12(destinations_.data(), sources_.data(), sizes_.data(), count,
                                     &attributes, &first, 1, &failed, stream);
    driver_.check(result, "copy " + std::to_string(failed) + " of a cuMemcpyBatchAsync");
  } else {
    for (std::size_t i = 0; i < count; ++i) {
      driver_.check(driver_.cuMemcpyAsync(destinations_[i], sources_[i], sizes_[i], stream),
                    "cuMemcpyAsync");
    }
  }
}

}  // namespace flexkv::cuda
