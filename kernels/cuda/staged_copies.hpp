// SPDX-License-Identifier: Apache-2.0
//
// Copies in two stages: the copy engine moves long runs of the arena from or to a ring in device
// memory, and a kernel gathers or scatters the pages' short runs there. The link is driven by what
// drives it fastest, and the kernel needs one or two multiprocessors: it never waits for the link.
#pragma once

#include <array>
#include <cstdint>

#include "device.hpp"
#include "driver_batch.hpp"
#include "event_pool.hpp"
#include "kernel_copies.hpp"
#include "lane.hpp"
#include "slot_runs.hpp"
#include "transfer.hpp"

namespace flexkv::cuda {

// The ring of one direction. A device must be current.
class Ring {
 public:
  // As many segments are on their way at most: one filled, one drained, others for threads and streams
  // that start late. Not tuned yet.
  static constexpr std::size_t kSegments = 8;

  struct Segment {
    CUdeviceptr memory = 0;
    CUevent filled = nullptr;
    CUevent drained = nullptr;
  };

  // Throws DriverError, std::bad_alloc.
  Ring(const Driver& driver, std::uint64_t bytes);
  ~Ring() { driver_.cuMemFree(memory_); }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  std::uint64_t segment_bytes() const noexcept { return segment_bytes_; }
  const Segment& next() const noexcept { return segments_[next_]; }
  void take() noexcept { next_ = (next_ + 1) % kSegments; }

 private:
  const Driver& driver_;
  EventPool events_;
  const std::uint64_t segment_bytes_;
  CUdeviceptr memory_ = 0;
  std::array<Segment, kSegments> segments_;
  std::size_t next_ = 0;
};

// Of one thread. A device must be current.
class StagedCopies {
 public:
  // `arena` is its address as the device sees it, `host_arena` as this process does.
  StagedCopies(const Device& device, const KernelCopies& kernels, const HostRange& range,
               std::uint64_t host_arena, std::uint64_t ring_bytes);

  // Whether a block of the transfer fits a segment, and not too much of the ring stays empty.
  bool takes(const SlotRuns& runs) const noexcept;

  // Lets the stream of the first stage wait until the next segment of the ring is free.
  void follow_ring(const Transfer& transfer, const Lane& lane);

  // Enqueues the next blocks of the transfer, as many as a segment holds. Throws DriverError; what was
  // enqueued ends before the lane's next slice then.
  Taken enqueue(Transfer& transfer, const Lane& lane);

 private:
  void copy_by_engine(const Transfer& transfer, std::uint64_t blocks, CUdeviceptr segment,
                      CUstream stream);
  void chain(CUevent event, CUstream first, CUstream second) const;

  const Driver& driver_;
  const KernelCopies& kernels_;
  const HostRange& range_;
  const std::uint64_t host_arena_;
  std::array<Ring, 2> rings_;  // by Direction
  DriverBatch batch_;
  std::uint32_t copies_ = 0;  // of the slice
};

}  // namespace flexkv::cuda
