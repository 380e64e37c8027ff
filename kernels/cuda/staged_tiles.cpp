// SPDX-License-Identifier: Apache-2.0
#include "staged_tiles.hpp"

#include <algorithm>
#include <string>

#include "tile_table.hpp"

namespace flexkv::cuda {
namespace {

constexpr std::uint64_t kTables = 3;

std::vector<Tile> cut(const Geometry& geometry) {
  std::vector<Tile> tiles;
  for (std::uint32_t i = geometry.first; i < geometry.last; ++i) {
    cut_plane(geometry.planes[i], kStagedTileBytes, tiles);
  }
  return tiles;
}

}  // namespace

StagedTables::StagedTables(const Driver& driver, const Layout& layout)
    : driver_(driver), room_(kTables * cut(layout.all()).size()) {
  const std::uint64_t bytes = room_ * sizeof(Tile);
  driver_.check(driver_.cuMemAlloc(&memory_, bytes), "cuMemAlloc of " + std::to_string(bytes) +
                                                         " bytes for the tiles of a ring");
  const CUresult made = driver_.cuStreamCreateWithPriority(&stream_, CU_STREAM_NON_BLOCKING, 0);
  if (made != CUDA_SUCCESS) {
    driver_.cuMemFree(memory_);
    driver_.check(made, "cuStreamCreateWithPriority");
  }
}

StagedTables::~StagedTables() {
  driver_.cuStreamDestroy(stream_);
  driver_.cuMemFree(memory_);
}

const StagedTiles* StagedTables::of(const Geometry& geometry) {
  const std::pair range{geometry.first, geometry.last};
  auto found = known_.find(range);
  if (found == known_.end()) {
    found = known_.emplace(range, make(geometry)).first;
  }
  return found->second.has_value() ? &*found->second : nullptr;
}

std::optional<StagedTiles> StagedTables::make(const Geometry& geometry) {
  std::vector<Tile> tiles = cut(geometry);
  if (tiles.size() > room_ - used_) {
    return std::nullopt;
  }
  std::ranges::sort(tiles, {}, &Tile::slot);
  StagedTiles made;
  std::uint64_t start = 0;
  for (Tile& tile : tiles) {
    made.starts.push_back(start);
    tile.slot = start;
    start += std::uint64_t{tile.rows} * tile.row_bytes;
  }
  made.starts.push_back(start);
  made.width = page_width(geometry);
  const CUdeviceptr memory = memory_ + used_ * sizeof(Tile);
  driver_.check(driver_.cuMemcpyAsync(memory, reinterpret_cast<CUdeviceptr>(tiles.data()),
                                      tiles.size() * sizeof(Tile), stream_),
                "the copy of the tiles of a ring");
  driver_.check(driver_.cuStreamSynchronize(stream_), "the copy of the tiles of a ring");
  made.tiles = reinterpret_cast<const Tile*>(memory);
  used_ += tiles.size();
  return made;
}

}  // namespace flexkv::cuda
