// SPDX-License-Identifier: Apache-2.0
#include "staged_copies.hpp"

#include <algorithm>

#include "ranges.hpp"

namespace flexkv::cuda {
namespace {

// So much of a ring is a segment, while the link is what takes the time: some are filled, some drained,
// others wait for threads that wake late. An event between two costs the copy engine some 2 us; of 8 MiB
// that is 1.3 %. Not tuned yet.
constexpr std::uint64_t kSegments = 8;

// The first of a store and the last of a load, in which one stage works alone. Not tuned yet.
constexpr std::uint64_t kShortBytes = std::uint64_t{1} << 20;

constexpr std::uint64_t kBlockAlign = 16;  // the widest access

std::uint64_t bytes_left(const Transfer& transfer) {
  const std::vector<std::uint64_t>& starts = transfer.staged_tiles->starts;
  return (transfer.blocks.size() - transfer.launched) * starts.back() - starts[transfer.tile];
}

}  // namespace

Segment next_segment(const Transfer& transfer, std::uint64_t bytes) {
  const std::vector<std::uint64_t>& starts = transfer.staged_tiles->starts;
  const std::uint64_t stride = (starts.back() + kBlockAlign - 1) / kBlockAlign * kBlockAlign;
  if (transfer.tile == 0 && stride <= bytes) {
    const std::uint64_t blocks = std::min(
        {bytes / stride, transfer.blocks.size() - transfer.launched, std::uint64_t{kPlaces}});
    return {blocks, 0, transfer.staged_tiles->count(), stride, blocks * stride};
  }
  const std::uint32_t first = transfer.tile;
  const auto behind = std::upper_bound(starts.begin() + first + 2, starts.end(), starts[first] + bytes);
  const auto last = static_cast<std::uint32_t>(behind - starts.begin() - 1);
  return {1, first, last, 0, starts[last] - starts[first]};
}

StagedCopies::StagedCopies(const Device& device, const KernelCopies& kernels,
                           const HostRange& range, const Layout& layout, std::uint64_t ring_bytes)
    : driver_(device.driver()),
      kernels_(kernels),
      range_(range),
      host_arena_(reinterpret_cast<std::uintptr_t>(layout.arena())),
      tables_(driver_, layout),
      events_(driver_),
      sides_{Side{Ring(driver_, ring_bytes), {}}, Side{Ring(driver_, ring_bytes), {}}},
      batch_(driver_) {
  // As many as slices can be on their way: nothing is made while transfers run.
  std::array<CUevent, 2 * Lane::kSlices> events;
  std::ranges::generate(events, [this] { return events_.take(); });
  std::ranges::for_each(events, [this](CUevent event) { events_.put(event); });
}

void StagedCopies::use_of_rings(std::uint64_t bytes) noexcept {
  for (Side& side : sides_) {
    side.ring.use(bytes);
  }
}

std::optional<Taken> StagedCopies::enqueue(Transfer& transfer, const Lane& lane) {
  Side& side = sides_[index_of(transfer.direction)];
  forget_drained(side, lane.ring_freed());
  const Segment segment = next_segment(transfer, segment_bytes(transfer, side));
  if (waits(transfer, side) || !side.ring.fits(segment.bytes)) {
    return std::nullopt;
  }
  CUevent filled = events_.take();
  const CUdeviceptr memory = side.ring.take(segment.bytes);
  side.in_flight.push_back({side.ring.taken(), filled});
  copies_ = 1;
  try {
    enqueue_stages(transfer, segment, memory, filled, lane);
  } catch (const DriverError&) {
    // The end of the slice is seen in the second stage's stream, which must not pass the first's work.
    if (driver_.cuEventRecord(filled, lane.first_stage()) == CUDA_SUCCESS) {
      driver_.cuStreamWaitEvent(lane.stream(), filled, 0);
    }
    throw;
  }
  transfer.segment_bytes = segment.bytes;
  transfer.tile = segment.last_tile % transfer.staged_tiles->count();
  transfer.launched += transfer.tile == 0 ? segment.blocks : 0;
  return Taken{copies_, transfer.launched == transfer.blocks.size()};
}

// Nothing waits in a stream until the ring has room: the lane's slices tell when a segment is drained.
void StagedCopies::forget_drained(Side& side, std::uint64_t freed) {
  side.ring.free_to(freed);
  while (!side.in_flight.empty() && side.in_flight.front().end <= freed) {
    events_.put(side.in_flight.front().filled);
    side.in_flight.pop_front();
  }
}

bool StagedCopies::filled(const InFlight& segment) const {
  const CUresult state = driver_.cuEventQuery(segment.filled);
  if (state != CUDA_ERROR_NOT_READY) {
    driver_.check(state, "copies of a first stage");
  }
  return state == CUDA_SUCCESS;
}

// Gathers behind one that an engine's kernels keep waiting would each wait again: two are given to the
// device, and the next one is larger.
bool StagedCopies::waits(const Transfer& transfer, const Side& side) const {
  const std::size_t count = side.in_flight.size();
  return transfer.direction == Direction::store && count >= 2 && !filled(side.in_flight[count - 2]);
}

// A kernel that waits for the engine's copies more at once: every segment that is ready then is one
// launch.
std::uint64_t StagedCopies::segment_bytes(const Transfer& transfer, const Side& side) const {
  const std::uint64_t usual = side.ring.bytes() / kSegments;
  const std::uint64_t least = std::min(kShortBytes, usual);
  const std::uint64_t most = side.ring.bytes() / 2;
  const std::uint64_t more = 2 * transfer.segment_bytes;
  // Of loads more wait for the kernel than the one that it may be at; of stores no more for the link.
  const bool two_filled = side.in_flight.size() >= 2 && filled(side.in_flight[1]);
  if (transfer.direction == Direction::load) {
    const std::uint64_t wanted = two_filled ? std::max(usual, more) : usual;
    return std::max(least, std::min({wanted, most, bytes_left(transfer) / 2}));
  }
  return two_filled ? usual : std::clamp(more, least, most);
}

void StagedCopies::enqueue_stages(const Transfer& transfer, const Segment& segment,
                                  CUdeviceptr memory, CUevent filled, const Lane& lane) {
  if (transfer.direction == Direction::load) {
    copy_by_engine(transfer, segment, memory, lane.first_stage());
    chain(filled, lane.first_stage(), lane.stream());
    kernels_.enqueue_staged(transfer, segment, memory, lane.stream());
  } else {
    kernels_.enqueue_staged(transfer, segment, memory, lane.first_stage());
    chain(filled, lane.first_stage(), lane.stream());
    copy_by_engine(transfer, segment, memory, lane.stream());
  }
}

void StagedCopies::chain(CUevent event, CUstream first, CUstream second) const {
  driver_.check(driver_.cuEventRecord(event, first), "cuEventRecord between two stages");
  driver_.check(driver_.cuStreamWaitEvent(second, event, 0), "cuStreamWaitEvent between two stages");
}

// Neighbours in the arena that are neighbours in the ring are one copy.
void StagedCopies::copy_by_engine(const Transfer& transfer, const Segment& segment,
                                  CUdeviceptr memory, CUstream stream) {
  const Range range("copy engines");
  const bool load = transfer.direction == Direction::load;
  const std::uint64_t from = transfer.staged_tiles->starts[segment.first_tile];
  const std::uint64_t to = transfer.staged_tiles->starts[segment.last_tile];
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
  for (std::uint64_t i = 0; i < segment.blocks; ++i) {
    const std::uint64_t block = host_arena_ + transfer.offsets[transfer.launched + i];
    for (const SlotRun& run : transfer.slot_runs->runs) {
      const std::uint64_t begin = std::max(run.start, from);
      const std::uint64_t end = std::min(run.start + run.bytes, to);
      if (begin >= end) {
        continue;
      }
      const std::uint64_t at = block + run.slot + (begin - run.start);
      const CUdeviceptr there = memory + i * segment.stride + (begin - from);
      if (bytes == 0 || host + bytes != at || ring + bytes != there) {
        add();
        host = at;
        ring = there;
      }
      bytes += end - begin;
    }
  }
  add();
  batch_.enqueue(stream);
}

}  // namespace flexkv::cuda
