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

// One plane with its place inside a block: the page of engine block b is `page_bytes` bytes at
// `base + b * block_stride` and lies `block_offset` bytes behind the start of the block in the arena.
struct Plane {
  std::uint64_t base;
  std::uint64_t block_stride;
  std::uint64_t page_bytes;
  std::uint64_t block_offset;
};

// A view of the planes of one mover, in block order; `planes` is borrowed.
struct Geometry {
  const Plane* planes;
  std::uint32_t n_planes;
  std::uint64_t num_blocks;
  std::uint64_t block_bytes;
};

// A place in a transfer of several blocks: byte `byte` of the page of plane `plane` of the
// transfer's block number `index`.
struct Position {
  std::uint64_t index;
  std::uint32_t plane;
  std::uint64_t byte;
};

// Bytes that are contiguous both among the pages and in the arena.
struct Run {
  std::uint64_t page_address;
  std::uint64_t arena_offset;
  std::uint64_t bytes;
};

FKV_HOST_DEVICE constexpr std::uint64_t page_address(const Plane& plane, std::uint64_t block) {
  return plane.base + block * plane.block_stride;
}

// The plane that holds byte `offset` of a block (offset < block_bytes).
FKV_HOST_DEVICE constexpr std::uint32_t plane_at(const Geometry& geometry, std::uint64_t offset) {
  std::uint32_t low = 0;
  std::uint32_t high = geometry.n_planes;
  while (high - low > 1) {
    const std::uint32_t middle = low + (high - low) / 2;
    if (geometry.planes[middle].block_offset <= offset) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// The place of byte `offset` of a transfer, counted over its blocks in order.
FKV_HOST_DEVICE constexpr Position locate(const Geometry& geometry, std::uint64_t offset) {
  const std::uint64_t index = offset / geometry.block_bytes;
  const std::uint64_t within = offset % geometry.block_bytes;
  const std::uint32_t plane = plane_at(geometry, within);
  return {index, plane, within - geometry.planes[plane].block_offset};
}

// The rest of the page at `position`, at most `limit` bytes.
FKV_HOST_DEVICE constexpr Run run_at(const Geometry& geometry, const Position& position,
                                     const std::uint64_t* blocks, const std::uint64_t* offsets,
                                     std::uint64_t limit) {
  const Plane& plane = geometry.planes[position.plane];
  const std::uint64_t left = plane.page_bytes - position.byte;
  return {page_address(plane, blocks[position.index]) + position.byte,
          offsets[position.index] + plane.block_offset + position.byte, left < limit ? left : limit};
}

// The position `bytes` further on, where `bytes` does not pass the end of the page.
FKV_HOST_DEVICE constexpr Position advance(const Geometry& geometry, Position position,
                                           std::uint64_t bytes) {
  position.byte += bytes;
  if (position.byte == geometry.planes[position.plane].page_bytes) {
    position.byte = 0;
    position.plane += 1;
    if (position.plane == geometry.n_planes) {
      position.plane = 0;
      position.index += 1;
    }
  }
  return position;
}

// Whether plane b starts where plane a ends, in every block: then both are one plane.
FKV_HOST_DEVICE constexpr bool adjoins(const Plane& a, const Plane& b) {
  return a.block_stride == b.block_stride && a.base + a.page_bytes == b.base;
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
