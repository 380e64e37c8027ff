// SPDX-License-Identifier: Apache-2.0
#include "tile_table.hpp"

#include <algorithm>
#include <limits>
#include <string>

namespace flexkv::cuda {
namespace {

constexpr std::uint64_t kMaxTiles = std::numeric_limits<std::uint32_t>::max() / kPlaces;

void cut_plane(const Plane& plane, std::vector<Tile>& tiles) {
  const std::uint64_t rows_a_tile = std::max<std::uint64_t>(kTileBytes / plane.row_bytes, 1);
  for (std::uint64_t row = 0; row < plane.rows; row += rows_a_tile) {
    const std::uint64_t rows = std::min(rows_a_tile, plane.rows - row);
    for (std::uint64_t byte = 0; byte < plane.row_bytes; byte += kTileBytes) {
      if (tiles.size() == kMaxTiles) {
        throw InvalidArgument("a block has more than " + std::to_string(kMaxTiles) +
                              " pieces of up to " + std::to_string(kTileBytes) +
                              " bytes, too many for the CUDA mover");
      }
      const std::uint64_t bytes = std::min<std::uint64_t>(kTileBytes, plane.row_bytes - byte);
      tiles.push_back({plane.base + row * plane.row_stride + byte, plane.block_stride,
                       plane.slot_offset + row * plane.row_bytes + byte, plane.row_stride,
                       static_cast<std::uint32_t>(rows), static_cast<std::uint32_t>(bytes)});
    }
  }
}

}  // namespace

std::vector<Tile> cut_tiles(const Geometry& geometry) {
  std::vector<Tile> tiles;
  for (std::uint32_t i = 0; i < geometry.n_planes; ++i) {
    cut_plane(geometry.planes[i], tiles);
  }
  return tiles;
}

std::uint32_t common_width(const Geometry& geometry, std::uint64_t arena) {
  std::uint64_t bits = arena | 16;
  for (std::uint32_t i = 0; i < geometry.n_planes; ++i) {
    const Plane& plane = geometry.planes[i];
    bits |= plane.base | plane.block_stride | plane.row_bytes | plane.slot_offset;
    bits |= plane.rows > 1 ? plane.row_stride : 0;
  }
  return static_cast<std::uint32_t>(bits & (~bits + 1));  // the lowest bit set
}

TileTable::TileTable(const Driver& driver, const Layout& layout, std::uint64_t arena,
                     CUstream stream)
    : driver_(driver) {
  const Geometry loaded = layout.geometry(Direction::load);
  const Geometry stored = layout.geometry(Direction::store);
  std::vector<Tile> tiles = cut_tiles(loaded);
  const std::vector<Tile> more = cut_tiles(stored);
  const std::size_t first = tiles.size();
  tiles.insert(tiles.end(), more.begin(), more.end());
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
  const Tile* table = reinterpret_cast<const Tile*>(memory_);
  parts_ = {Part{table, static_cast<std::uint32_t>(first), common_width(loaded, arena)},
            Part{table + first, static_cast<std::uint32_t>(more.size()),
                 common_width(stored, arena)}};
}

TileTable::~TileTable() { driver_.cuMemFree(memory_); }

}  // namespace flexkv::cuda
