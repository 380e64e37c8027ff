// SPDX-License-Identifier: Apache-2.0
//
// The checked planes and arena of one mover.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "flexkv/mover.h"
#include "geometry.hpp"
#include "mover.hpp"

namespace flexkv {

class Layout {
 public:
  // Throws InvalidArgument for planes or an arena that cannot be, std::bad_alloc.
  explicit Layout(const fkv_layout& layout);

  // Of the planes that transfers in this direction copy; valid as long as the Layout.
  Geometry geometry(Direction direction) const noexcept;
  std::byte* arena() const noexcept { return arena_; }
  std::uint64_t arena_bytes() const noexcept { return arena_bytes_; }
  // Bytes of a block over all planes.
  std::uint64_t block_bytes() const noexcept { return loaded_.bytes; }

  // Throws InvalidArgument naming the first copy of the batch that is out of range, and
  // std::bad_alloc.
  void check(const Batch& batch) const;

 private:
  // Planes in order, those that adjoin joined, and their bytes of one block.
  struct Part {
    std::vector<Plane> planes;
    std::uint64_t bytes = 0;
  };

  static Part join(std::span<const fkv_plane> planes);

  std::uint64_t num_blocks_;
  std::byte* arena_;
  std::uint64_t arena_bytes_;
  std::uint64_t span_ = 0;
  Part loaded_;
  Part stored_;
};

}  // namespace flexkv
