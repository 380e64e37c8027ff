// SPDX-License-Identifier: Apache-2.0
//
// The checked planes and arena of one mover.
#pragma once

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
  Layout(std::span<const fkv_plane> planes, std::uint64_t num_blocks, void* arena,
         std::uint64_t arena_bytes);

  Geometry geometry() const noexcept;
  std::byte* arena() const noexcept { return arena_; }
  std::uint64_t block_bytes() const noexcept { return block_bytes_; }

  // Throws InvalidArgument naming the first copy of the batch that is out of range, and
  // std::bad_alloc.
  void check(const Batch& batch) const;

 private:
  std::vector<Plane> planes_;
  std::uint64_t num_blocks_;
  std::uint64_t block_bytes_ = 0;
  std::byte* arena_;
  std::uint64_t arena_bytes_;
};

}  // namespace flexkv
