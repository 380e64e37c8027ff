// SPDX-License-Identifier: Apache-2.0
//
// The work of the copy kernels: blocks cut into tiles, and where the bytes of a tile are. Shared by
// the kernels, which see it through nvcc, and by host code, which cuts the tiles and tests the rest.
#pragma once

#include <cstdint>

#include "geometry.hpp"

#if defined(__CUDACC__)
#define FKV_UNROLL _Pragma("unroll")
#else
#define FKV_UNROLL
#endif

namespace flexkv::cuda {

// The most bytes of a tile, a multiple of 16. One warp copies a tile: large enough that looking it
// up costs little (about one access to device memory), small enough that few blocks give work to all
// warps. Not tuned yet.
constexpr std::uint32_t kTileBytes = 8 * 1024;

// The same between a ring and the pages: of four, a warp's staging takes 16 KiB of shared memory, which
// attention kernels leave. Not tuned yet.
constexpr std::uint32_t kStagedTileBytes = 4 * 1024;

constexpr std::uint32_t kWarpThreads = 32;

// Which thread of a launch runs: number `thread` of `threads` in block `block` of `blocks`.
struct ThreadPlace {
  std::uint32_t block;
  std::uint32_t blocks;
  std::uint32_t thread;
  std::uint32_t threads;
};

// A part of a page. In engine block b its row r is at page + b * block_stride + r * row_stride; in the
// arena, or in a ring, its rows follow one another from `slot` bytes behind the block's place.
struct alignas(16) Tile {
  std::uint64_t page;
  std::uint64_t block_stride;
  std::uint64_t slot;
  std::uint64_t row_stride;
  std::uint32_t rows;
  std::uint32_t row_bytes;
};

// The widest access that fits addresses and lengths of these bits: the lowest bit that is set.
constexpr std::uint32_t width_of(std::uint64_t bits) {
  return static_cast<std::uint32_t>(bits & (~bits + 1));
}

// Where one block of a transfer is.
struct Place {
  std::uint64_t block;   // of the engine
  std::uint64_t offset;  // in the arena or the ring
};

// The blocks of one launch. Every driver takes 4 KiB of parameters, which hold so many; with blocks
// of 128 KiB, small for a KV cache, that is a launch for each 30 MiB.
constexpr std::uint32_t kPlaces = 252;

// The parameter of a launch. Block ids travel in it, so no buffer has to outlive the call and no
// copy has to come first.
struct CopyBatch {
  const Tile* tiles;    // in device memory
  std::uint64_t arena;  // address of the arena, or of a ring, as the device sees it
  std::uint32_t n_tiles;
  std::uint32_t n_places;
  std::uint32_t load;  // 1: arena -> pages, 0: pages -> arena
  std::uint32_t stage_bytes;  // of the bulk kernel: at least the bytes of each tile
  Place places[kPlaces];
};
static_assert(sizeof(CopyBatch) <= 4096);

// One tile of one block. Items are numbered block by block, as the bytes lie in the arena.
struct Item {
  Tile tile;
  std::uint64_t page;   // address of row 0
  std::uint64_t arena;  // address
};

// At most 2^32 - 1: the mover refuses blocks of more tiles than that allows.
FKV_HOST_DEVICE inline std::uint32_t item_count(const CopyBatch& batch) {
  return batch.n_tiles * batch.n_places;
}

FKV_HOST_DEVICE inline Item item_at(const CopyBatch& batch, std::uint32_t number) {
  const Place& place = batch.places[number / batch.n_tiles];
  const Tile tile = batch.tiles[number % batch.n_tiles];
  return {tile, tile.page + place.block * tile.block_stride, batch.arena + place.offset + tile.slot};
}

// The places of one lane's units in a tile: units lane, lane + 32, lane + 64 ... counted over the
// rows. Divides once, then only adds.
class LaneUnits {
 public:
  FKV_HOST_DEVICE LaneUnits(const Tile& tile, std::uint32_t width, std::uint32_t lane)
      : row_units_(tile.row_bytes / width),
        step_rows_(kWarpThreads / row_units_),
        step_columns_(kWarpThreads % row_units_),
        row_(lane / row_units_),
        column_(lane % row_units_),
        row_stride_(tile.row_stride),
        width_(width) {}

  // Bytes from the tile's first row to this unit, on the side of the pages.
  FKV_HOST_DEVICE std::uint64_t page_offset() const { return row_ * row_stride_ + column_ * width_; }

  FKV_HOST_DEVICE void next() {
    row_ += step_rows_;
    column_ += step_columns_;
    if (column_ >= row_units_) {
      column_ -= row_units_;
      row_ += 1;
    }
  }

 private:
  std::uint32_t row_units_;
  std::uint32_t step_rows_;
  std::uint32_t step_columns_;
  std::uint32_t row_;
  std::uint32_t column_;
  std::uint64_t row_stride_;
  std::uint32_t width_;
};

}  // namespace flexkv::cuda
