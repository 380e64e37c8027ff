// SPDX-License-Identifier: Apache-2.0
//
// The tiles of a mover's blocks, in device memory.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "device.hpp"
#include "geometry.hpp"
#include "layout.hpp"
#include "tiles.hpp"

namespace flexkv::cuda {

// Cuts a block at row ends, and rows of more than kTileBytes at multiples of that. Throws
// InvalidArgument if a launch could not number so many, std::bad_alloc.
std::vector<Tile> cut_tiles(const Geometry& geometry);

// The widest access in bytes, at most 16, that fits every address of the geometry and every length,
// given blocks at `arena` plus a multiple of it.
std::uint32_t common_width(const Geometry& geometry, std::uint64_t arena);

// The tiles of both directions, made once. A device must be current when one is made or destroyed.
class TileTable {
 public:
  struct Part {
    const Tile* tiles = nullptr;  // address in device memory
    std::uint32_t count = 0;
    std::uint32_t width = 0;  // see common_width
  };

  // `arena` is its address as the device sees it; `stream` takes the table to the device, which is
  // waited for. Throws InvalidArgument, DriverError, std::bad_alloc.
  TileTable(const Driver& driver, const Layout& layout, std::uint64_t arena, CUstream stream);
  ~TileTable();
  TileTable(const TileTable&) = delete;
  TileTable& operator=(const TileTable&) = delete;

  const Part& part(Direction direction) const noexcept {
    return parts_[static_cast<std::size_t>(direction)];
  }

 private:
  const Driver& driver_;
  CUdeviceptr memory_ = 0;
  std::array<Part, 2> parts_;
};

}  // namespace flexkv::cuda
