// SPDX-License-Identifier: Apache-2.0
//
// The tiles of a mover's blocks, in device memory.
#pragma once

#include <cstdint>
#include <vector>

#include "device.hpp"
#include "geometry.hpp"
#include "layout.hpp"
#include "tiles.hpp"

namespace flexkv::cuda {

// The widest access in bytes, at most 16, that fits every address among the pages and every length.
std::uint32_t page_width(const Geometry& geometry);

// The same for the arena, too, given blocks at multiples of it there.
std::uint32_t common_width(const Geometry& geometry);

// Adds the tiles of a plane: it is cut at row ends, and rows of more than `tile_bytes`, a multiple of 16,
// at multiples of that. Throws std::bad_alloc.
void cut_plane(const Plane& plane, std::uint32_t tile_bytes, std::vector<Tile>& tiles);

// The tiles of all planes as they lie in the arena, made once. A device must be current when one is made
// or destroyed.
class TileTable {
 public:
  struct Part {
    const Tile* tiles = nullptr;  // address in device memory
    std::uint32_t count = 0;
    std::uint32_t width = 0;  // see common_width
  };

  // `stream` takes the table to the device, which is waited for; `layout` must outlive this. Throws InvalidArgument if a launch could not number so
  // many tiles, DriverError, std::bad_alloc.
  TileTable(const Driver& driver, const Layout& layout, CUstream stream);
  ~TileTable();
  TileTable(const TileTable&) = delete;
  TileTable& operator=(const TileTable&) = delete;

  // Of the planes of one of the layout's geometries.
  Part part(const Geometry& geometry) const noexcept;

 private:
  const Driver& driver_;
  CUdeviceptr memory_ = 0;
  std::vector<std::uint32_t> first_tiles_;  // by plane, and the number of all
};

}  // namespace flexkv::cuda
