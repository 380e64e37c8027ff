// SPDX-License-Identifier: Apache-2.0
//
// The mover for pages in the memory of a CUDA device.
//
// Submit only records the transfer, and an event on the caller's stream. One thread does the rest:
// it cuts transfers into slices, enqueues them on a stream for each direction, loads first, and
// watches their ends. Only it talks to the driver for long, so a caller never waits for the driver
// to take a batch.
#pragma once

#include <array>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include "cuda_tuning.hpp"
#include "device.hpp"
#include "layout.hpp"
#include "marks.hpp"
#include "ticketed_mover.hpp"
#include "transfer.hpp"
#include "ways.hpp"

namespace flexkv::cuda {

struct DeviceSide;
class Lane;

class CudaMover final : public TicketedMover {
 public:
  CudaMover(Layout layout, const CudaTuning& tuning);
  ~CudaMover() override;

  // Registers the arena, takes what the copies need of the device and starts the thread; called
  // once, before any other call. Throws InvalidArgument, DriverError, std::bad_alloc,
  // std::system_error.
  void start(const Driver& driver, std::int32_t ordinal);

  std::uint64_t block_bytes() const override { return layout_.block_bytes(); }
  std::int64_t submit(const Batch& batch) override;
  std::int64_t mark(std::uint64_t stream) override;
  std::optional<Status> hold(std::int64_t ticket, std::uint64_t stream,
                             std::int64_t timeout_us) override;
  void close() override;
  std::string error() override;
  // See fkv_cuda_mover_force and fkv_cuda_mover_ring_bytes. Throws InvalidArgument, Closed.
  void force(const Way& way, std::uint64_t ring_bytes);
  std::uint64_t ring_bytes() const noexcept { return ring_bytes_; }

  std::array<std::uint64_t, 5> path_bytes() const override { return way_counts_.read(); }

 private:
  // Callers' side, all under mutex_.
  void require_working() const;
  TransferPtr take_transfer(const Batch& batch);
  SharedEvent followed(const Batch& batch);
  SharedEvent record(const std::string& name, std::uint64_t stream);
  void follow(std::uint64_t stream, CUevent event);
  template <typename Call>
  std::invoke_result_t<Call> with_device(const Call& call);

  // The thread's side.
  void work();
  bool wait_for_work();
  bool can_enqueue(std::size_t direction) const;
  bool enqueue_slice(std::size_t direction);
  std::optional<Taken> enqueue_copies(Transfer& transfer, const Lane& lane);
  void begin(Transfer& transfer, const Lane& lane);
  void follow_after(Transfer& transfer, CUstream stream);
  void write_flag(Transfer& transfer, CUstream stream) const;
  void collect_ended();
  void finish(TransferPtr transfer);
  void drain();
  void break_down(const std::string& reason);
  void fail_all();

  const Layout layout_;
  CudaTuning tuning_;  // changes while no transfer is pending
  std::uint64_t ring_bytes_ = 0;

  // Made by start(), unmade by close(). Of the thread, but for the pool of events.
  std::unique_ptr<DeviceSide> device_side_;
  std::array<TransferPtr, 2> active_;  // by Direction: being enqueued; of the thread
  std::array<bool, 2> waits_{};        // by Direction: until a ring has room; of the thread
  WayCounts way_counts_;

  // Guarded by mutex_, up to thread_.
  std::condition_variable work_;
  std::array<std::deque<TransferPtr>, 2> queues_;  // by Direction
  // The events behind pending transfers that are all on the device, by ticket.
  std::unordered_map<std::int64_t, CUevent> ends_;
  std::vector<TransferPtr> spare_;                 // done with, their memory is used again
  Marks marks_;
  std::string error_;                              // of the last failure
  bool broken_ = false;                            // the device's context has failed
  bool closing_ = false;

  std::mutex close_mutex_;  // guards thread_
  std::thread thread_;
};

}  // namespace flexkv::cuda
