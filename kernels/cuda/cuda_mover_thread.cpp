// SPDX-License-Identifier: Apache-2.0
//
// The thread of the CUDA mover: it gives the device the copies and watches their ends.
#include <sys/prctl.h>

#include <chrono>
#include <new>
#include <utility>

#include "cuda_mover.hpp"
#include "device_side.hpp"
#include "flag.hpp"
#include "ranges.hpp"

namespace flexkv::cuda {
namespace {

// How often the thread looks for the ends of slices on their way: much less than a slice takes, and
// rare enough to cost a few percent of a core while copies run. At other times the thread sleeps.
constexpr std::chrono::microseconds kWatchInterval{50};

// The kernel may wake a thread so much later than asked, by default 50 us.
constexpr unsigned long kTimerSlackNs = 5000;

}  // namespace

void CudaMover::work() {
  prctl(PR_SET_TIMERSLACK, kTimerSlackNs, 0, 0, 0);
  try {
    const CurrentDevice current(*device_side_->device);
    while (wait_for_work()) {
      for (std::size_t direction : {index_of(Direction::load), index_of(Direction::store)}) {
        if (active_[direction] != nullptr && !device_side_->lanes[direction].full() &&
            enqueue_slice(direction)) {
          break;  // look for a load before the next slice of a store
        }
      }
      collect_ended();
    }
    drain();
  } catch (const DriverError& error) {
    break_down(error.what());
  } catch (const std::bad_alloc&) {
    break_down("no memory for a copy");
  }
}

// Sleeps until a slice can be enqueued or may have ended, and takes transfers off the queues. False
// when closing.
bool CudaMover::wait_for_work() {
  const bool on_their_way = !device_side_->lanes[0].empty() || !device_side_->lanes[1].empty();
  std::unique_lock lock(mutex_);
  const auto ready = [&] { return closing_ || can_enqueue(0) || can_enqueue(1); };
  if (on_their_way) {
    work_.wait_for(lock, kWatchInterval, ready);
  } else {
    waits_ = {};  // all rings are empty
    work_.wait(lock, ready);
  }
  for (std::size_t direction : {0, 1}) {
    waits_[direction] = false;
    if (active_[direction] == nullptr && !queues_[direction].empty()) {
      active_[direction] = std::move(queues_[direction].front());
      queues_[direction].pop_front();
    }
  }
  return !closing_;
}

bool CudaMover::can_enqueue(std::size_t direction) const {
  return !device_side_->lanes[direction].full() && !waits_[direction] &&
         (active_[direction] != nullptr || !queues_[direction].empty());
}

// An error of the driver ends the transfer: it fails once what was enqueued of it has ended. If not
// even that can be told, the device has failed, and this throws. False if the slice must wait for others.
bool CudaMover::enqueue_slice(std::size_t direction) {
  TransferPtr& transfer = active_[direction];
  const Range range(by_direction(transfer->direction, "load", "store"));
  Lane& lane = device_side_->lanes[direction];
  Taken taken;
  try {
    if (!transfer->path.has_value()) {
      begin(*transfer, lane);
    }
    const std::optional<Taken> enqueued = enqueue_copies(*transfer, lane);
    if (!enqueued.has_value()) {
      waits_[direction] = true;
      return false;
    }
    taken = *enqueued;
    if (taken.last) {
      write_flag(*transfer, lane.stream());
    }
  } catch (const DriverError& error) {
    transfer->failed = true;
    taken.last = true;
    const std::lock_guard lock(mutex_);
    error_ = error.what();
  }
  const std::int64_t ticket = transfer->ticket;
  const bool failed = transfer->failed;
  const StagedCopies* staged = device_side_->staged_copies.get();
  const std::uint64_t ring_end =
      staged == nullptr ? 0 : staged->taken(static_cast<Direction>(direction));
  CUevent end = lane.end_slice(transfer, taken, ring_end);
  if (taken.last && !failed) {
    const std::lock_guard lock(mutex_);
    ends_.emplace(ticket, end);
    finished_.notify_all();
  }
  return true;
}

void CudaMover::begin(Transfer& transfer, const Lane& lane) {
  device_side_->ways.choose(transfer);
  const bool staged = transfer.path == Path::staged;
  const CUstream stream = staged ? lane.first_stage() : lane.stream();
  if (transfer.after != nullptr) {
    follow_after(transfer, stream);
  }
  transfer.begun = device_side_->timed_events.take();
  device_side_->driver().check(device_side_->driver().cuEventRecord(transfer.begun, stream),
                               "cuEventRecord before copies");
}

void CudaMover::follow_after(Transfer& transfer, CUstream stream) {
  const CUresult result = device_side_->driver().cuStreamWaitEvent(stream, transfer.after.get(), 0);
  {
    // The stream waits for what the event holds now: it can be recorded again.
    const std::lock_guard lock(mutex_);
    transfer.after.reset();
  }
  device_side_->driver().check(result, "cuStreamWaitEvent");
}

std::optional<Taken> CudaMover::enqueue_copies(Transfer& transfer, const Lane& lane) {
  switch (*transfer.path) {
    case Path::driver:
      return device_side_->driver_copies.enqueue(transfer, lane.stream());
    case Path::staged:
      return device_side_->staged_copies->enqueue(transfer, lane);
    default:
      return device_side_->kernel_copies.enqueue(transfer, lane.stream());
  }
}

// A flag in the arena is written by the stream, so that a process that watches it need not wait for
// this thread to wake. Other flags, and those a driver does not write, are written by finish(). A
// host function in the stream would do too, but none runs after an error.
void CudaMover::write_flag(Transfer& transfer, CUstream stream) const {
  if (transfer.flag == nullptr) {
    return;
  }
  const CUdeviceptr address = device_side_->arena.device_address_of(transfer.flag);
  // The default flags put a fence before the write: all bytes are in place first.
  transfer.flag_in_stream =
      address != 0 && device_side_->driver().cuStreamWriteValue32(
                          stream, address, FKV_DONE, CU_STREAM_WRITE_VALUE_DEFAULT) == CUDA_SUCCESS;
}

void CudaMover::collect_ended() {
  for (Lane& lane : device_side_->lanes) {
    for (TransferPtr transfer; lane.pop(transfer);) {
      if (transfer != nullptr) {
        finish(std::move(transfer));
      }
    }
  }
}

void CudaMover::finish(TransferPtr transfer) {
  if (transfer->begun != nullptr) {
    device_side_->timed_events.put(transfer->begun);
  }
  const std::lock_guard lock(mutex_);
  transfer->after.reset();  // still there if the transfer failed at once
  ends_.erase(transfer->ticket);
  if (transfer->failed) {
    raise_failed_flag(transfer->flag);
    tickets_.fail(transfer->ticket);
  } else {
    if (!transfer->flag_in_stream) {
      raise_flag(transfer->flag, Status::done);
    }
    tickets_.finish(transfer->ticket, transfer->copy_ns);
  }
  spare_.push_back(std::move(transfer));
  finished_.notify_all();
}

// Waits for what is on its way.
void CudaMover::drain() {
  for (;;) {
    collect_ended();
    if (device_side_->lanes[0].empty() && device_side_->lanes[1].empty()) {
      return;
    }
    std::this_thread::sleep_for(kWatchInterval);
  }
}

// Takes no more transfers. Copies that the device has are waited for before they fail: callers use their
// memory again then. If the context has failed, nothing is copied any more, and the driver says so at
// once.
void CudaMover::break_down(const std::string& reason) {
  {
    const std::lock_guard lock(mutex_);
    broken_ = true;
    error_ = reason;
  }
  try {
    const CurrentDevice current(*device_side_->device);
    for (const Lane& lane : device_side_->lanes) {
      lane.wait();
    }
  } catch (const DriverError&) {
    // Not even the context can be used.
  }
  fail_all();
}

// Fails everything that has not ended. Called when the thread has nothing more on its way.
void CudaMover::fail_all() {
  const std::lock_guard lock(mutex_);
  for (std::size_t direction : {0, 1}) {
    if (device_side_ != nullptr) {
      for (Lane& lane = device_side_->lanes[direction]; !lane.empty();) {
        if (const TransferPtr transfer = lane.drop()) {
          raise_failed_flag(transfer->flag);
        }
      }
    }
    if (active_[direction] != nullptr) {
      raise_failed_flag(active_[direction]->flag);
      active_[direction] = nullptr;
    }
    for (const TransferPtr& transfer : queues_[direction]) {
      raise_failed_flag(transfer->flag);
    }
    queues_[direction].clear();
  }
  ends_.clear();
  tickets_.fail_pending();
  finished_.notify_all();
}

}  // namespace flexkv::cuda
