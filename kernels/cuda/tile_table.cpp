// SPDX-License-Identifier: Apache-2.0
#include "tile_table.hpp"

#include <algorithm>
#include <limits>
#include <string>

namespace flexkv::cuda {
namespace {

constexpr std::uint64_t kWidest = 16;
constexpr std::uint64_t kMaxTiles = std::numeric_limits<std::uint32_t>::max() / kPlaces;

}  // namespace

void cut_plane(const Plane& plane, std::uint32_t tile_bytes, std::vector<Tile>& tiles) {
  const std::uint64_t rows_a_tile = std::max<std::uint64_t>(tile_bytes / plane.row_bytes, 1);
  for (std::uint64_t row = 0; row < plane.rows; row += rows_a_tile) {
    const std::uint64_t rows = std::min(rows_a_tile, plane.rows - row);
    for (std::uint64_t byte = 0; byte < plane.row_bytes; byte += tile_bytes) {
      const std::uint64_t bytes = std::min<std::uint64_t>(tile_bytes, plane.row_bytes - byte);
      tiles.push_back({plane.base + row * plane.row_stride + byte, plane.block_stride,
                       plane.slot_offset + row * plane.row_bytes + byte, plane.row_stride,
                       static_cast<std::uint32_t>(rows), static_cast<std::uint32_t>(bytes)});
    }
  }
}

std::uint32_t page_width(const Geometry& geometry) {
  std::uint64_t bits = kWidest;
  for (std::uint32_t i = geometry.first; i < geometry.last; ++i) {
    const Plane& plane = geometry.planes[i];
    bits |= plane.base | plane.block_stride | plane.row_bytes;
    bits |= plane.rows > 1 ? plane.row_stride : 0;
  }
  return width_of(bits);
}

std::uint32_t common_width(const Geometry& geometry) {
  std::uint64_t bits = page_width(geometry);
  for (std::uint32_t i = geometry.first; i < geometry.last; ++i) {
    bits |= geometry.planes[i].slot_offset;
  }
  return width_of(bits);
}

TileTable::TileTable(const Driver& driver, const Layout& layout, CUstream stream)
    : driver_(driver) {
  const Geometry all = layout.all();
  std::vector<Tile> tiles;
  for (std::uint32_t i = all.first; i < all.last; ++i) {
    first_tiles_.push_back(static_cast<std::uint32_t>(tiles.size()));
    cut_plane(all.planes[i], kTileBytes, tiles);
    if (tiles.size() > kMaxTiles) {
      throw InvalidArgument("a block has more than " + std::to_string(kMaxTiles) +
                            " pieces of up to " + std::to_string(kTileBytes) +
                            " bytes, too many for the CUDA mover");
    }
  }
  first_tiles_.push_back(static_cast<std::uint32_t>(tiles.size()));
  const std::size_t bytes = tiles.size() * sizeof(Tile);
  driver_.check(driver_.cuMemAlloc(&memory_, bytes), "cuMemAlloc of " + std::to_string(bytes) +
                                                         " bytes for the table of tiles");
  CUresult copied = driver_.cuMemcpyAsync(
      memory_, reinterpret_cast<CUdeviceptr>(tiles.data()), bytes, stream);
  if (copied == CUDA_SUCCESS) {
    copied = driver_.cuStreamSynchronize(stream);
  }
  if (copied != CUDA_SUCCESS) {
    driver_.cuMemFree(memory_);
    driver_.check(copied, "the copy of the table of tiles");
  }
}

TileTable::Part TileTable::part(const Geometry& geometry) const noexcept {
  const std::uint32_t first = first_tiles_[geometry.first];
  return {reinterpret_cast<const Tile*>(memory_) + first, first_tiles_[geometry.last] - first,
          common_width(geometry)};
}

TileTable::~TileTable() { driver_.cuMemFree(memory_); }

}  // namespace flexkv::cuda
