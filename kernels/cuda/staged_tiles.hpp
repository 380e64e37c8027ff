// SPDX-License-Identifier: Apache-2.0
//
// The tiles of a ring, in which a block has the bytes of its planes in the order of the arena and no
// gaps: planes that are not copied, and other engine blocks of a slot, take no room in it.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "driver.hpp"
#include "geometry.hpp"
#include "layout.hpp"
#include "tiles.hpp"

namespace flexkv::cuda {

// Those of the planes of a geometry. A block can be cut before each.
struct StagedTiles {
  const Tile* tiles = nullptr;  // address in device memory
  std::vector<std::uint64_t> starts;  // of each in the block, and the block's bytes
  std::uint32_t width = 0;  // of an access that fits the pages' addresses and all lengths

  std::uint32_t count() const noexcept { return static_cast<std::uint32_t>(starts.size() - 1); }
};

// Made once for each range of planes that is copied. Of one thread. A device must be current.
class StagedTables {
 public:
  // Takes the memory for three times all tiles: an engine loads all planes, or all in parts, and stores
  // a share of them. Throws DriverError, std::bad_alloc.
  StagedTables(const Driver& driver, const Layout& layout);
  ~StagedTables();
  StagedTables(const StagedTables&) = delete;
  StagedTables& operator=(const StagedTables&) = delete;

  // Good as long as this; nullptr if the memory is used up. Throws DriverError, std::bad_alloc.
  const StagedTiles* of(const Geometry& geometry);

 private:
  std::optional<StagedTiles> make(const Geometry& geometry);

  const Driver& driver_;
  CUdeviceptr memory_ = 0;
  CUstream stream_ = nullptr;  // of nothing else, so that waiting for it takes microseconds
  std::uint64_t room_ = 0;  // tiles
  std::uint64_t used_ = 0;
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::optional<StagedTiles>> known_;
};

}  // namespace flexkv::cuda
