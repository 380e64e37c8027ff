// SPDX-License-Identifier: Apache-2.0
#include "lane.hpp"

#include <algorithm>
#include <utility>

#include "event_pool.hpp"

namespace flexkv::cuda {

Lane::Lane(const Driver& driver, int priority) : driver_(driver) {
  try {
    // Non-blocking: not ordered with the legacy default stream, which an engine may use for compute.
    for (CUstream* stream : {&stream_, &first_stage_}) {
      driver_.check(driver_.cuStreamCreateWithPriority(stream, CU_STREAM_NON_BLOCKING, priority),
                    "cuStreamCreateWithPriority");
    }
    for (Slice& slice : slices_) {
      slice.end = create_event(driver_, true);
    }
  } catch (...) {
    destroy();
    throw;
  }
}

void Lane::destroy() noexcept {
  for (Slice& slice : slices_) {
    if (slice.end != nullptr) {
      driver_.cuEventDestroy(slice.end);
    }
  }
  for (CUstream stream : {stream_, first_stage_}) {
    if (stream != nullptr) {
      driver_.cuStreamDestroy(stream);
    }
  }
}

CUevent Lane::end_slice(TransferPtr& transfer, const Taken& taken, std::uint64_t ring_end) {
  Slice& slice = slices_[(oldest_ + count_) % kSlices];
  driver_.check(driver_.cuEventRecord(slice.end, stream_), "cuEventRecord after copies");
  slice.transfer = taken.last ? std::move(transfer) : nullptr;
  slice.copies = taken.copies;
  slice.ring_end = ring_end;
  copies_ += taken.copies;
  count_ += 1;
  return slice.end;
}

bool Lane::pop(TransferPtr& transfer) {
  if (empty()) {
    return false;
  }
  const CUresult state = driver_.cuEventQuery(slices_[oldest_].end);
  if (state == CUDA_ERROR_NOT_READY) {
    return false;
  }
  driver_.check(state, "copies");
  const CUevent end = slices_[oldest_].end;
  transfer = drop();
  if (transfer != nullptr && transfer->begun != nullptr) {
    transfer->copy_ns = nanoseconds_between(transfer->begun, end);
  }
  return true;
}

// 0 if the driver does not say: the time is worth less than the bytes, which are in place.
std::int64_t Lane::nanoseconds_between(CUevent begin, CUevent end) const noexcept {
  float milliseconds = 0;
  if (driver_.cuEventElapsedTime(&milliseconds, begin, end) != CUDA_SUCCESS) {
    return 0;
  }
  return std::max<std::int64_t>(1, static_cast<std::int64_t>(milliseconds * 1e6));
}

void Lane::wait() const noexcept {
  for (CUstream stream : {first_stage_, stream_}) {
    driver_.cuStreamSynchronize(stream);
  }
}

TransferPtr Lane::drop() noexcept {
  TransferPtr transfer = std::move(slices_[oldest_].transfer);
  copies_ -= slices_[oldest_].copies;
  ring_freed_ = slices_[oldest_].ring_end;
  oldest_ = (oldest_ + 1) % kSlices;
  count_ -= 1;
  return transfer;
}

}  // namespace flexkv::cuda
