// SPDX-License-Identifier: Apache-2.0
//
// The checked planes and arena of one mover.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "flexkv/mover.h"
#include "geometry.hpp"
#include "mover.hpp"

namespace flexkv {

class Layout {
 public:
  // Throws InvalidArgument for planes or an arena that cannot be, std::bad_alloc.
  explicit Layout(const fkv_layout& layout);

  // Every plane; valid as long as the Layout.
  Geometry all() const noexcept { return part(0, n_planes()); }
  // The planes that a checked batch copies, perhaps none: those it names, and for a store of these
  // those in the share. Valid as long as the Layout.
  Geometry geometry(const Batch& batch) const noexcept;
  std::byte* arena() const noexcept { return arena_; }
  std::uint64_t arena_bytes() const noexcept { return arena_bytes_; }
  // Bytes of a block over all planes.
  std::uint64_t block_bytes() const noexcept { return bytes_before(n_planes()); }

  // Throws InvalidArgument naming the batch's planes or its first copy that is out of range, and
  // std::bad_alloc.
  void check(const Batch& batch) const;

 private:
  std::uint32_t n_planes() const noexcept { return static_cast<std::uint32_t>(planes_.size()); }
  // Bytes of a block over the planes before this one.
  std::uint64_t bytes_before(std::uint32_t plane) const noexcept;
  // The planes from `first` to before `last`.
  Geometry part(std::uint32_t first, std::uint32_t last) const noexcept;

  std::uint64_t num_blocks_;
  std::byte* arena_;
  std::uint64_t arena_bytes_;
  std::uint64_t span_ = 0;
  std::vector<Plane> planes_;
  std::uint32_t store_first_;  // of the share
  std::uint32_t store_last_;
};

}  // namespace flexkv
