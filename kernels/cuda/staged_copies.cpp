// SPDX-License-Identifier: Apache-2.0
#include "staged_copies.hpp"

#include <algorithm>
#include <string>

#include "ranges.hpp"

namespace flexkv::cuda {
namespace {

constexpr std::uint64_t kSegmentAlign = 256;

std::size_t index_of(const Transfer& transfer) {
  return static_cast<std::size_t>(transfer.direction);
}

}  // namespace

Ring::Ring(const Driver& driver, std::uint64_t bytes)
    : driver_(driver),
      events_(driver),
      segment_bytes_(bytes / kSegments / kSegmentAlign * kSegmentAlign) {
  for (Segment& segment : segments_) {
    segment.filled = events_.take();
    segment.drained = events_.take();
  }
  driver_.check(driver_.cuMemAlloc(&memory_, segment_bytes_ * kSegments),
                "cuMemAlloc of " + std::to_string(segment_bytes_ * kSegments) +
                    " bytes for a ring between the arena and the pages");
  for (std::size_t i = 0; i < kSegments; ++i) {
    segments_[i].memory = memory_ + i * segment_bytes_;
  }
}

StagedCopies::StagedCopies(const Device& device, const KernelCopies& kernels,
                           const HostRange& range, std::uint64_t host_arena,
                           std::uint64_t ring_bytes)
    : driver_(device.driver()),
      kernels_(kernels),
      range_(range),
      host_arena_(host_arena),
      rings_{Ring(driver_, ring_bytes), Ring(driver_, ring_bytes)},
      batch_(driver_) {}

bool StagedCopies::takes(const SlotRuns& runs) const noexcept {
  return runs.stride <= rings_[0].segment_bytes() && runs.bytes >= runs.stride / 2;
}

// An event that was never recorded is waited for by nobody.
void StagedCopies::follow_ring(const Transfer& transfer, const Lane& lane) {
  driver_.check(driver_.cuStreamWaitEvent(lane.first_stage(),
                                          rings_[index_of(transfer)].next().drained, 0),
                "cuStreamWaitEvent for the ring");
}

Taken StagedCopies::enqueue(Transfer& transfer, const Lane& lane) {
  const bool load = transfer.direction == Direction::load;
  Ring& ring = rings_[index_of(transfer)];
  const Ring::Segment& segment = ring.next();
  const SlotRuns& runs = *transfer.slot_runs;
  const std::uint64_t blocks =
      std::min({std::uint64_t{kPlaces}, transfer.blocks.size() - transfer.launched,
                ring.segment_bytes() / runs.stride});
  copies_ = 1;
  follow_ring(transfer, lane);
  ring.take();
  try {
    if (load) {
      copy_by_engine(transfer, blocks, segment.memory, lane.first_stage());
      chain(segment.filled, lane.first_stage(), lane.stream());
      kernels_.enqueue_staged(transfer, blocks, segment.memory, lane.stream());
    } else {
      kernels_.enqueue_staged(transfer, blocks, segment.memory, lane.first_stage());
      chain(segment.filled, lane.first_stage(), lane.stream());
      copy_by_engine(transfer, blocks, segment.memory, lane.stream());
    }
  } catch (const DriverError&) {
    // The end of the slice is seen in the second stage's stream, which must not pass the first's work.
    if (driver_.cuEventRecord(segment.filled, lane.first_stage()) == CUDA_SUCCESS) {
      driver_.cuStreamWaitEvent(lane.stream(), segment.filled, 0);
    }
    throw;
  }
  driver_.check(driver_.cuEventRecord(segment.drained, lane.stream()), "cuEventRecord of the ring");
  transfer.launched += blocks;
  return {copies_, transfer.launched == transfer.blocks.size()};
}

void StagedCopies::chain(CUevent event, CUstream first, CUstream second) const {
  driver_.check(driver_.cuEventRecord(event, first), "cuEventRecord between two stages");
  driver_.check(driver_.cuStreamWaitEvent(second, event, 0), "cuStreamWaitEvent between two stages");
}

// Neighbours in the arena that are neighbours in the ring are one copy.
void StagedCopies::copy_by_engine(const Transfer& transfer, std::uint64_t blocks,
                                  CUdeviceptr segment, CUstream stream) {
  const Range range("copy engines");
  const SlotRuns& runs = *transfer.slot_runs;
  const bool load = transfer.direction == Direction::load;
  std::uint64_t host = 0;
  CUdeviceptr ring = 0;
  std::uint64_t bytes = 0;
  const auto add = [&] {
    while (bytes != 0) {
      if (batch_.full()) {
        batch_.enqueue(stream);
      }
      const std::uint64_t piece = std::min(bytes, bytes_to_border(range_, host));
      const CUdeviceptr arena = range_.device_address + (host - range_.address);
      batch_.add(load ? ring : arena, load ? arena : ring, piece);
      copies_ += 1;
      host += piece;
      ring += piece;
      bytes -= piece;
    }
  };
  for (std::uint64_t i = 0; i < blocks; ++i) {
    for (const SlotRun& run : runs.runs) {
      const std::uint64_t at =
          host_arena_ + transfer.offsets[transfer.launched + i] + run.slot;
      const CUdeviceptr to = segment + i * runs.stride + (run.slot - runs.begin);
      if (bytes == 0 || host + bytes != at || ring + bytes != to) {
        add();
        host = at;
        ring = to;
      }
      bytes += run.bytes;
    }
  }
  add();
  batch_.enqueue(stream);
}

}  // namespace flexkv::cuda
