// SPDX-License-Identifier: Apache-2.0
#include "driver_copies.hpp"

#include <algorithm>

#include "ranges.hpp"

namespace flexkv::cuda {
namespace {

// Runs looked at to tell how a transfer falls apart; blocks of a transfer resemble one another.
constexpr std::uint64_t kSampledRuns = 256;

}  // namespace

DriverCopies::DriverCopies(const Driver& driver, const Layout& layout, const HostRange& range)
    : batch_(driver),
      range_(range),
      arena_(reinterpret_cast<std::uintptr_t>(layout.arena())) {}

RunCursor DriverCopies::cursor(const Transfer& transfer) {
  return {transfer.geometry, transfer.blocks.data(), transfer.offsets.data(), 0,
          transfer.geometry.block_bytes * transfer.blocks.size()};
}

std::uint64_t DriverCopies::mean_run(const Transfer& transfer) {
  RunCursor runs = cursor(transfer);
  std::uint64_t bytes = 0;
  std::uint64_t count = 0;
  for (Run run; count < kSampledRuns && runs.next(run); ++count) {
    bytes += run.bytes;
  }
  return bytes / std::max<std::uint64_t>(count, 1);
}

// The next run, or what is left of one that passes the end of a registered piece of the arena: the
// driver takes no copy across.
bool DriverCopies::next_piece(Transfer& transfer, Run& piece) const {
  if (transfer.rest.bytes == 0 && !transfer.runs->next(transfer.rest)) {
    return false;
  }
  piece = transfer.rest;
  piece.bytes = std::min(piece.bytes, bytes_to_border(range_, arena_ + piece.arena_offset));
  transfer.rest.page_address += piece.bytes;
  transfer.rest.arena_offset += piece.bytes;
  transfer.rest.bytes -= piece.bytes;
  return true;
}

Taken DriverCopies::enqueue(Transfer& transfer, CUstream stream) {
  const Range range("copy engines");
  if (!transfer.runs.has_value()) {
    transfer.runs.emplace(cursor(transfer));
    transfer.rest = {};
  }
  const bool load = transfer.direction == Direction::load;
  const std::uint64_t arena = range_.device_address + (arena_ - range_.address);
  for (Run piece; !batch_.full() && next_piece(transfer, piece);) {
    const CUdeviceptr page = piece.page_address;
    const CUdeviceptr slot = arena + piece.arena_offset;
    batch_.add(load ? page : slot, load ? slot : page, piece.bytes);
  }
  const Taken taken{batch_.count(), !batch_.full()};
  batch_.enqueue(stream);
  return taken;
}

}  // namespace flexkv::cuda
