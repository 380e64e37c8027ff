// SPDX-License-Identifier: Apache-2.0
//
// The callers' side of the CUDA mover.
#include "cuda_mover.hpp"

#include <pthread.h>

#include <utility>

#include "device_side.hpp"
#include "flag.hpp"
#include "ranges.hpp"

namespace flexkv::cuda {

CudaMover::CudaMover(Layout layout, const CudaTuning& tuning)
    : layout_(std::move(layout)), tuning_(tuning) {}

CudaMover::~CudaMover() { close(); }

void CudaMover::start(const Driver& driver, std::int32_t ordinal) {
  const std::lock_guard lock(close_mutex_);
  auto device = Device::open(driver, ordinal);
  if (tuning_.forced == Path::bulk_kernel && !device->has_bulk_copy()) {
    throw InvalidArgument("mode is 3 (TMA), which device " + std::to_string(ordinal) +
                          " lacks: it takes a compute capability of 9.0 or more");
  }
  const CurrentDevice current(*device);
  device_side_ = std::make_unique<DeviceSide>(device, layout_, tuning_, way_counts_);
  if (device_side_->staged_copies != nullptr) {
    ring_bytes_ = device_side_->staged_copies->ring_bytes();
  }
  thread_ = std::thread(&CudaMover::work, this);
  pthread_setname_np(thread_.native_handle(), "flexkv-mover");
}

// The thread looks at these only for transfers, which come to it by way of the lock.
void CudaMover::force(const Way& way, std::uint64_t ring_bytes) {
  require_own_process();
  const std::lock_guard lock(mutex_);
  require_working();
  if (tickets_.any_pending()) {
    throw InvalidArgument("transfers are pending: their way is chosen");
  }
  if (way.path == Path::bulk_kernel && !device_side_->device->has_bulk_copy()) {
    throw InvalidArgument("mode is 3 (TMA), which this device lacks");
  }
  if (way.path == Path::staged && (ring_bytes_ == 0 || ring_bytes > ring_bytes_)) {
    throw InvalidArgument("ring_bytes is " + std::to_string(ring_bytes) +
                          ", the mover's rings have " + std::to_string(ring_bytes_));
  }
  if (ring_bytes != 0 && ring_bytes < StagedCopies::kMinRingBytes) {
    throw InvalidArgument("ring_bytes is " + std::to_string(ring_bytes) + ", it must be at least " +
                          std::to_string(StagedCopies::kMinRingBytes));
  }
  tuning_.forced = way.path;
  tuning_.thread_blocks = way.thread_blocks;
  if (way.path == Path::staged) {
    device_side_->staged_copies->use_of_rings(ring_bytes == 0 ? ring_bytes_ : ring_bytes);
  }
}

void CudaMover::require_working() const {
  if (closing_) {
    throw Closed("the mover is closed");
  }
  if (broken_) {
    throw Closed("the CUDA device no longer works for this process: " + error_);
  }
}

std::int64_t CudaMover::submit(const Batch& batch) {
  const Range range(by_direction(batch.direction, "submit load", "submit store"));
  require_own_process();
  require_aligned(batch.flag);
  layout_.check(batch);
  const std::lock_guard lock(mutex_);
  require_working();
  if (batch.n == 0 || layout_.geometry(batch).block_bytes == 0) {
    raise_flag(batch.flag, Status::done);
    return tickets_.issue_done();
  }
  auto& queue = queues_[index_of(batch.direction)];
  queue.push_back(take_transfer(batch));
  Transfer& transfer = *queue.back();
  try {
    transfer.after = followed(batch);
    transfer.ticket = tickets_.issue_pending();
  } catch (...) {
    queue.pop_back();
    throw;
  }
  work_.notify_one();
  return transfer.ticket;
}

TransferPtr CudaMover::take_transfer(const Batch& batch) {
  TransferPtr transfer;
  if (spare_.empty()) {
    transfer = std::make_unique<Transfer>();
  } else {
    transfer = std::move(spare_.back());
    spare_.pop_back();
  }
  auto blocks = std::move(transfer->blocks);
  auto offsets = std::move(transfer->offsets);
  blocks.assign(batch.blocks, batch.blocks + batch.n);
  offsets.assign(batch.offsets, batch.offsets + batch.n);
  *transfer = Transfer{};
  transfer->direction = batch.direction;
  transfer->geometry = layout_.geometry(batch);
  transfer->blocks = std::move(blocks);
  transfer->offsets = std::move(offsets);
  transfer->flag = batch.flag;
  return transfer;
}

std::int64_t CudaMover::mark(std::uint64_t stream) {
  require_own_process();
  if (stream == 0) {
    throw InvalidArgument("stream is 0, which is no stream; 1 is the legacy default stream");
  }
  const std::lock_guard lock(mutex_);
  require_working();
  return marks_.add(record("stream", stream));
}

SharedEvent CudaMover::followed(const Batch& batch) {
  if (batch.mark != 0) {
    return marks_.find(batch.mark);
  }
  return batch.after == 0 ? nullptr : record("after", batch.after);
}

SharedEvent CudaMover::record(const std::string& name, std::uint64_t stream) {
  return with_device(
      [&] { return record_event(device_side_->driver(), device_side_->events, name, stream); });
}

std::optional<Status> CudaMover::hold(std::int64_t ticket, std::uint64_t stream,
                                      std::int64_t timeout_us) {
  if (stream == 0) {
    return wait(ticket, timeout_us);
  }
  require_own_process();
  std::unique_lock lock(mutex_);
  await(lock, ticket, timeout_us, [&] {
    return ends_.contains(ticket) || tickets_.status(ticket) != Status::pending;
  });
  const auto end = ends_.find(ticket);
  if (end == ends_.end()) {
    return tickets_.status(ticket);
  }
  // With the lock: the event cannot be recorded again before finish() has forgotten it.
  follow(stream, end->second);
  return std::nullopt;
}

void CudaMover::follow(std::uint64_t stream, CUevent event) {
  with_device([&] {
    const Driver& driver = device_side_->driver();
    check_not_captured(driver, "stream", stream);
    check_stream(driver, driver.cuStreamWaitEvent(reinterpret_cast<CUstream>(stream), event, 0),
                 "stream", stream, "cuStreamWaitEvent");
  });
}

// An error that is not the caller's ends the mover's use for this caller.
template <typename Call>
std::invoke_result_t<Call> CudaMover::with_device(const Call& call) {
  try {
    const CurrentDevice current(*device_side_->device);
    return call();
  } catch (const DriverError& error) {
    error_ = error.what();
    throw Closed("the CUDA device no longer works for this process: " + error_);
  }
}

std::string CudaMover::error() {
  require_own_process();
  const std::lock_guard lock(mutex_);
  return error_;
}

void CudaMover::close() {
  if (orphaned()) {
    return;
  }
  const std::lock_guard close_lock(close_mutex_);
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  work_.notify_all();
  if (thread_.joinable()) {
    thread_.join();
  }
  fail_all();
  if (device_side_ == nullptr) {
    return;
  }
  marks_.clear();  // no other thread looks at them: the mover is closing
  const std::shared_ptr<Device> device = device_side_->device;  // outlives its context's use
  try {
    const CurrentDevice current(*device);
    device_side_.reset();
  } catch (const DriverError&) {
    device_side_.reset();  // the context has failed: the driver refuses each call, which is ignored
  }
}

}  // namespace flexkv::cuda
