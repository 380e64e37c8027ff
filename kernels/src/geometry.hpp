// SPDX-License-Identifier: Apache-2.0
//
// Where the bytes of a block are: address arithmetic without allocation, library calls or state, so
// that host and device code share it.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define FKV_HOST_DEVICE __host__ __device__
#else
#define FKV_HOST_DEVICE
#endif

namespace flexkv {

// One plane: row r of engine block b is `row_bytes` bytes at base + b * block_stride + r * row_stride.
// In the arena its rows follow one another `slot_offset` bytes behind the block's place. All planes
// before it together have `start` bytes a block.
struct Plane {
  std::uint64_t base;
  std::uint64_t block_stride;
  std::uint64_t rows;
  std::uint64_t row_stride;
  std::uint64_t row_bytes;
  std::uint64_t slot_offset;
  std::uint64_t start;
};

// The planes that a transfer copies: numbers first .. last - 1 of all, in this order. `planes` are all
// of the mover, borrowed.
struct Geometry {
  const Plane* planes;
  std::uint32_t first;
  std::uint32_t last;
  std::uint64_t block_bytes;  // over these planes
};

// A place in a transfer of several blocks: byte `byte` of row `row` of the page of plane `plane` of
// the transfer's block number `index`.
struct Position {
  std::uint64_t index;
  std::uint32_t plane;
  std::uint64_t row;
  std::uint64_t byte;
};

// Bytes that are contiguous both among the pages and in the arena.
struct Run {
  std::uint64_t page_address;
  std::uint64_t arena_offset;
  std::uint64_t bytes;
};

FKV_HOST_DEVICE constexpr std::uint64_t page_bytes(const Plane& plane) {
  return plane.rows * plane.row_bytes;
}

FKV_HOST_DEVICE constexpr std::uint64_t row_address(const Plane& plane, std::uint64_t block,
                                                    std::uint64_t row) {
  return plane.base + block * plane.block_stride + row * plane.row_stride;
}

// The plane that holds byte `offset` of a block, counted over all planes and within the geometry's.
FKV_HOST_DEVICE constexpr std::uint32_t plane_at(const Geometry& geometry, std::uint64_t offset) {
  std::uint32_t low = geometry.first;
  std::uint32_t high = geometry.last;
  while (high - low > 1) {
    const std::uint32_t middle = low + (high - low) / 2;
    if (geometry.planes[middle].start <= offset) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// The place of byte `offset` of a transfer, counted over its blocks in order. Not for a geometry
// without planes.
FKV_HOST_DEVICE constexpr Position locate(const Geometry& geometry, std::uint64_t offset) {
  const std::uint64_t within =
      geometry.planes[geometry.first].start + offset % geometry.block_bytes;
  const std::uint32_t number = plane_at(geometry, within);
  const Plane& plane = geometry.planes[number];
  const std::uint64_t byte = within - plane.start;
  return {offset / geometry.block_bytes, number, byte / plane.row_bytes, byte % plane.row_bytes};
}

// The rest of the row at `position`, at most `limit` bytes.
FKV_HOST_DEVICE constexpr Run run_at(const Geometry& geometry, const Position& position,
                                     const std::uint64_t* blocks, const std::uint64_t* offsets,
                                     std::uint64_t limit) {
  const Plane& plane = geometry.planes[position.plane];
  const std::uint64_t left = plane.row_bytes - position.byte;
  return {row_address(plane, blocks[position.index], position.row) + position.byte,
          offsets[position.index] + plane.slot_offset + position.row * plane.row_bytes +
              position.byte,
          left < limit ? left : limit};
}

// The position `bytes` further on, where `bytes` does not pass the end of the row.
FKV_HOST_DEVICE constexpr Position advance(const Geometry& geometry, Position position,
                                           std::uint64_t bytes) {
  const Plane& plane = geometry.planes[position.plane];
  position.byte += bytes;
  if (position.byte < plane.row_bytes) {
    return position;
  }
  position.byte = 0;
  position.row += 1;
  if (position.row < plane.rows) {
    return position;
  }
  position.row = 0;
  position.plane += 1;
  if (position.plane == geometry.last) {
    position.plane = geometry.first;
    position.index += 1;
  }
  return position;
}

// Walks the bytes [begin, end) of a transfer as runs, each as long as both sides are contiguous.
class RunCursor {
 public:
  FKV_HOST_DEVICE constexpr RunCursor(const Geometry& geometry, const std::uint64_t* blocks,
                                      const std::uint64_t* offsets, std::uint64_t begin,
                                      std::uint64_t end)
      : geometry_(geometry),
        blocks_(blocks),
        offsets_(offsets),
        position_(locate(geometry, begin)),
        left_(end - begin) {}

  // The next run, or false at the end.
  FKV_HOST_DEVICE constexpr bool next(Run& run) {
    if (left_ == 0) {
      return false;
    }
    run = take();
    while (left_ != 0) {
      const Run more = run_at(geometry_, position_, blocks_, offsets_, left_);
      if (run.page_address + run.bytes != more.page_address ||
          run.arena_offset + run.bytes != more.arena_offset) {
        break;
      }
      run.bytes += take().bytes;
    }
    return true;
  }

 private:
  FKV_HOST_DEVICE constexpr Run take() {
    const Run run = run_at(geometry_, position_, blocks_, offsets_, left_);
    position_ = advance(geometry_, position_, run.bytes);
    left_ -= run.bytes;
    return run;
  }

  Geometry geometry_;
  const std::uint64_t* blocks_;
  const std::uint64_t* offsets_;
  Position position_;
  std::uint64_t left_;
};

}  // namespace flexkv
