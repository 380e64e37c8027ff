// SPDX-License-Identifier: Apache-2.0
//
// Copies in two stages: the copy engine moves long runs of the arena from or to a ring in device
// memory, and a kernel gathers or scatters the pages' short runs there. The link is driven by what
// drives it fastest, and the kernel's blocks fit beside those of an engine: it never waits for the link.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <optional>

#include "device.hpp"
#include "driver_batch.hpp"
#include "event_pool.hpp"
#include "kernel_copies.hpp"
#include "lane.hpp"
#include "ring.hpp"
#include "slot_runs.hpp"
#include "staged_tiles.hpp"
#include "transfer.hpp"

namespace flexkv::cuda {

// What goes through a ring at once: whole blocks of a transfer, or tiles of the next one.
struct Segment {
  std::uint64_t blocks;
  std::uint32_t first_tile;
  std::uint32_t last_tile;  // the one behind
  std::uint64_t stride;     // from block to block in the ring
  std::uint64_t bytes;
};

// The next segment, of about so many bytes and at least a tile.
Segment next_segment(const Transfer& transfer, std::uint64_t bytes);

// Of one thread. A device must be current.
class StagedCopies {
 public:
  // Of `ring_bytes`, as few as this.
  static constexpr std::uint64_t kMinRingBytes = 16 * kStagedTileBytes;

  // `host_arena` is the arena's address in this process. Throws DriverError, std::bad_alloc.
  StagedCopies(const Device& device, const KernelCopies& kernels, const HostRange& range,
               const Layout& layout, std::uint64_t ring_bytes);

  // Those of a transfer; nullptr if there is no memory for them. Throws DriverError, std::bad_alloc.
  const StagedTiles* tiles(const Transfer& transfer) { return tables_.of(transfer.geometry); }

  // Enqueues the next segment of the transfer; nothing while the ring has no room for it. Throws
  // DriverError; what was enqueued ends before the lane's next slice then.
  std::optional<Taken> enqueue(Transfer& transfer, const Lane& lane);

  // The position of a direction's ring up to which segments are enqueued; see Lane::ring_freed.
  std::uint64_t taken(Direction direction) const noexcept {
    return sides_[index_of(direction)].ring.taken();
  }

  std::uint64_t ring_bytes() const noexcept { return sides_[0].ring.bytes(); }

  // See Ring::use.
  void use_of_rings(std::uint64_t bytes) noexcept;

 private:
  // A segment on its way.
  struct InFlight {
    std::uint64_t end;  // its ring's position
    CUevent filled;
  };

  struct Side {
    Ring ring;
    std::deque<InFlight> in_flight;
  };

  void forget_drained(Side& side, std::uint64_t freed);
  bool waits(const Transfer& transfer, const Side& side) const;
  std::uint64_t segment_bytes(const Transfer& transfer, const Side& side) const;
  bool filled(const InFlight& segment) const;
  void enqueue_stages(const Transfer& transfer, const Segment& segment, CUdeviceptr memory,
                      CUevent filled, const Lane& lane);
  void copy_by_engine(const Transfer& transfer, const Segment& segment, CUdeviceptr memory,
                      CUstream stream);
  void chain(CUevent event, CUstream first, CUstream second) const;

  const Driver& driver_;
  const KernelCopies& kernels_;
  const HostRange& range_;
  const std::uint64_t host_arena_;
  StagedTables tables_;
  EventPool events_;
  std::array<Side, 2> sides_;  // by Direction
  DriverBatch batch_;
  std::uint32_t copies_ = 0;  // of the slice
};

}  // namespace flexkv::cuda
