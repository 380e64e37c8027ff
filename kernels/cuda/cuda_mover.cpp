// SPDX-License-Identifier: Apache-2.0
#include "cuda_mover.hpp"

#include <pthread.h>
#include <sys/prctl.h>

#include <chrono>
#include <new>
#include <utility>

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

constexpr std::size_t index_of(Direction direction) { return static_cast<std::size_t>(direction); }

}  // namespace

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
  thread_ = std::thread(&CudaMover::work, this);
  pthread_setname_np(thread_.native_handle(), "flexkv-mover");
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

void CudaMover::work() {
  prctl(PR_SET_TIMERSLACK, kTimerSlackNs, 0, 0, 0);
  try {
    const CurrentDevice current(*device_side_->device);
    while (wait_for_work()) {
      for (std::size_t direction : {index_of(Direction::load), index_of(Direction::store)}) {
        if (active_[direction] != nullptr && !device_side_->lanes[direction].full()) {
          enqueue_slice(direction);
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
    work_.wait(lock, ready);
  }
  for (std::size_t direction : {0, 1}) {
    if (active_[direction] == nullptr && !queues_[direction].empty()) {
      active_[direction] = std::move(queues_[direction].front());
      queues_[direction].pop_front();
    }
  }
  return !closing_;
}

bool CudaMover::can_enqueue(std::size_t direction) const {
  return !device_side_->lanes[direction].full() &&
         (active_[direction] != nullptr || !queues_[direction].empty());
}

// An error of the driver ends the transfer: it fails once what was enqueued of it has ended. If not
// even that can be told, the device has failed, and this throws.
void CudaMover::enqueue_slice(std::size_t direction) {
  TransferPtr& transfer = active_[direction];
  const Range range(by_direction(transfer->direction, "load", "store"));
  Lane& lane = device_side_->lanes[direction];
  Taken taken;
  try {
    if (!transfer->path.has_value()) {
      begin(*transfer, lane);
    }
    taken = enqueue_copies(*transfer, lane);
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
  CUevent end = lane.end_slice(transfer, taken);
  if (taken.last && !failed) {
    const std::lock_guard lock(mutex_);
    ends_.emplace(ticket, end);
    finished_.notify_all();
  }
}

void CudaMover::begin(Transfer& transfer, const Lane& lane) {
  device_side_->ways.choose(transfer);
  const bool staged = transfer.path == Path::staged;
  const CUstream stream = staged ? lane.first_stage() : lane.stream();
  if (transfer.after != nullptr) {
    follow_after(transfer, stream);
  }
  if (staged) {
    device_side_->staged_copies->follow_ring(transfer, lane);
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

Taken CudaMover::enqueue_copies(Transfer& transfer, const Lane& lane) {
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

// The context has failed: nothing more will be copied, now or later.
void CudaMover::break_down(const std::string& reason) {
  {
    const std::lock_guard lock(mutex_);
    broken_ = true;
    error_ = reason;
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
