// SPDX-License-Identifier: Apache-2.0
//
// The streams of one direction and what is on its way in them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "driver.hpp"
#include "transfer.hpp"

namespace flexkv::cuda {

// Transfers enter a stream in slices, each followed by an event; only so much is in the stream at a
// time. So the driver's queues never fill (a full one makes the caller wait inside the
// driver, and with it the engine's launches), a load waits for little, and closing is quick. Of one
// thread. A device must be current.
class Lane {
 public:
  // Of a load in parts, say layer by layer, a slice may be as short as 5 us: so many outlast the time
  // in which the thread looks again.
  static constexpr std::size_t kSlices = 32;

  // Throws DriverError.
  Lane(const Driver& driver, int priority);
  ~Lane() { destroy(); }
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  // Where copies end, and slices with them.
  CUstream stream() const noexcept { return stream_; }
  // For the first of two stages.
  CUstream first_stage() const noexcept { return first_stage_; }
  bool empty() const noexcept { return count_ == 0; }
  bool full() const noexcept { return count_ == kSlices || copies_ >= kCopies; }

  // Ends a slice; with the last one the lane takes the transfer. Not when full. `ring_end` is the
  // position of the direction's ring up to which its segments are free once the slice has ended.
  // Returns the event behind it, which is used again once the slice was popped. Throws DriverError,
  // and then takes nothing.
  CUevent end_slice(TransferPtr& transfer, const Taken& taken, std::uint64_t ring_end);

  // That of the last slice that was popped.
  std::uint64_t ring_freed() const noexcept { return ring_freed_; }

  // Whether the oldest slice has ended, which is then forgotten; `transfer` becomes the one it was
  // the last slice of, with the time that it took, or nullptr. Throws DriverError if the device has failed.
  bool pop(TransferPtr& transfer);

  // Waits until both streams are empty, or cannot be waited for because the context has failed.
  void wait() const noexcept;

  // Forgets the oldest slice, whether it has ended or not. Not when empty.
  TransferPtr drop() noexcept;

 private:
  // Tuned on nothing yet. A full slice of driver copies takes some 100 us to enqueue, one of a kernel
  // copies tens of MiB: two keep the stream busy, two more cover for a thread that wakes late. Those
  // are 4 * 252 copies.
  static constexpr std::uint32_t kCopies = 1000;

  struct Slice {
    CUevent end = nullptr;
    std::uint32_t copies = 0;
    std::uint64_t ring_end = 0;
    TransferPtr transfer;
  };

  void destroy() noexcept;
  std::int64_t nanoseconds_between(CUevent begin, CUevent end) const noexcept;

  const Driver& driver_;
  CUstream stream_ = nullptr;
  CUstream first_stage_ = nullptr;
  std::array<Slice, kSlices> slices_;
  std::size_t oldest_ = 0;
  std::size_t count_ = 0;
  std::uint32_t copies_ = 0;  // of all slices
  std::uint64_t ring_freed_ = 0;
};

}  // namespace flexkv::cuda
