// SPDX-License-Identifier: Apache-2.0
//
// A transfer on its way through the CUDA mover.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "geometry.hpp"
#include "marks.hpp"
#include "mover.hpp"

namespace flexkv::cuda {

// The ways bytes can go.
enum class Path : std::uint8_t { driver, kernel, bulk_kernel, staged };
constexpr std::size_t kPaths = 4;

constexpr std::size_t index_of(Direction direction) { return static_cast<std::size_t>(direction); }

struct SlotRuns;
struct StagedTiles;

// What one slice has taken of a transfer.
struct Taken {
  std::uint32_t copies = 0;  // by the driver; by a kernel, blocks
  bool last = true;          // nothing is left
};

struct Transfer {
  Direction direction = Direction::load;
  Geometry geometry{};
  std::vector<std::uint64_t> blocks;
  std::vector<std::uint64_t> offsets;
  std::uint32_t* flag = nullptr;
  std::int64_t ticket = 0;
  SharedEvent after;  // what the stream must wait for first; nullptr: nothing

  // Where the copying thread stands.
  std::optional<Path> path;  // none: not begun
  std::optional<RunCursor> runs;  // Path::driver: what is left
  Run rest{};                     // Path::driver: of a run that had to be cut
  std::uint64_t launched = 0;     // otherwise: blocks handed to the kernel
  std::uint32_t thread_blocks = 0;  // otherwise: the most of a launch
  const SlotRuns* slot_runs = nullptr;
  const StagedTiles* staged_tiles = nullptr;  // Path::staged
  std::uint32_t tile = 0;           // Path::staged: of the next block, the first that is left
  std::uint64_t segment_bytes = 0;  // Path::staged: of the last segment
  CUevent begun = nullptr;        // recorded before the first copy
  std::int64_t copy_ns = 0;       // see fkv_mover_copy_ns
  bool flag_in_stream = false;    // the stream writes the flag
  bool failed = false;
};

using TransferPtr = std::unique_ptr<Transfer>;

}  // namespace flexkv::cuda
