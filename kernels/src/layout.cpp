// SPDX-License-Identifier: Apache-2.0
#include "layout.hpp"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <numeric>
#include <string>

namespace flexkv {
namespace {

using std::to_string;

constexpr std::uint64_t kMax = std::numeric_limits<std::uint64_t>::max();

// Throws unless `count` steps of `step` bytes from `start` stay within the address space.
std::uint64_t end_of(std::uint64_t start, std::uint64_t step, std::uint64_t count,
                     const std::string& what) {
  if (count != 0 && step > (kMax - start) / count) {
    throw InvalidArgument(what + " pass the end of the address space");
  }
  return start + step * count;
}

void check_plane(const fkv_plane& plane, std::size_t number, std::uint64_t num_blocks) {
  const std::string where = "plane " + to_string(number) + ": ";
  if (plane.base == 0) {
    throw InvalidArgument(where + "base is a null pointer");
  }
  if (plane.row_bytes == 0 || plane.rows == 0) {
    throw InvalidArgument(where + "it has " + to_string(plane.rows) + " rows of " +
                          to_string(plane.row_bytes) + " bytes, both must be at least 1");
  }
  if (plane.row_stride < plane.row_bytes) {
    throw InvalidArgument(where + "row_stride " + to_string(plane.row_stride) +
                          " is smaller than row_bytes " + to_string(plane.row_bytes));
  }
  if (plane.block_stride < plane.row_bytes) {
    throw InvalidArgument(where + "block_stride " + to_string(plane.block_stride) +
                          " is smaller than row_bytes " + to_string(plane.row_bytes));
  }
  const std::uint64_t last_row =
      end_of(plane.base, plane.row_stride, plane.rows - 1, where + "its rows");
  const std::uint64_t last = end_of(last_row, plane.block_stride, num_blocks - 1,
                                    where + to_string(num_blocks) + " blocks of stride " +
                                        to_string(plane.block_stride));
  end_of(last, plane.row_bytes, 1, where + "its rows");
  end_of(plane.slot_offset, plane.row_bytes, plane.rows, where + "its bytes in the arena");
}

// Throws if two planes have the same bytes of the arena.
void check_places(std::span<const fkv_plane> planes) {
  std::vector<std::size_t> order(planes.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::sort(order, {}, [&](std::size_t i) { return planes[i].slot_offset; });
  for (std::size_t i = 1; i < order.size(); ++i) {
    const fkv_plane& plane = planes[order[i - 1]];
    if (planes[order[i]].slot_offset < plane.slot_offset + plane.rows * plane.row_bytes) {
      throw InvalidArgument("planes " + to_string(order[i - 1]) + " and " + to_string(order[i]) +
                            " share bytes of the arena");
    }
  }
}

}  // namespace

Layout::Layout(const fkv_layout& layout)
    : num_blocks_(layout.num_blocks),
      arena_(static_cast<std::byte*>(layout.arena)),
      arena_bytes_(layout.arena_bytes) {
  const std::span planes(layout.planes, layout.planes == nullptr ? 0 : layout.n_planes);
  if (planes.empty()) {
    throw InvalidArgument("no planes given, at least one is needed");
  }
  if (layout.store_first > planes.size() ||
      layout.store_count > planes.size() - layout.store_first) {
    throw InvalidArgument("stores are to copy " + to_string(layout.store_count) +
                          " planes from number " + to_string(layout.store_first) +
                          " on, but there are " + to_string(planes.size()));
  }
  if (num_blocks_ == 0) {
    throw InvalidArgument("num_blocks is 0, it must be at least 1");
  }
  if (arena_ == nullptr) {
    throw InvalidArgument("the arena is a null pointer");
  }
  end_of(reinterpret_cast<std::uintptr_t>(arena_), arena_bytes_, 1,
         "an arena of " + to_string(arena_bytes_) + " bytes would");
  for (std::size_t i = 0; i < planes.size(); ++i) {
    check_plane(planes[i], i, num_blocks_);
    span_ = std::max(span_, planes[i].slot_offset + planes[i].rows * planes[i].row_bytes);
  }
  check_places(planes);
  if (arena_bytes_ < span_) {
    throw InvalidArgument("an arena of " + to_string(arena_bytes_) +
                          " bytes cannot hold one block, which spans " + to_string(span_) +
                          " bytes");
  }
  loaded_ = join(planes);
  stored_ = join(planes.subspan(layout.store_first, layout.store_count));
}

Layout::Part Layout::join(std::span<const fkv_plane> planes) {
  Part part;
  part.planes.reserve(planes.size());
  for (const fkv_plane& given : planes) {
    Plane plane{given.base,      given.block_stride, given.rows, given.row_stride,
                given.row_bytes, given.slot_offset,  part.bytes};
    if (plane.row_stride == plane.row_bytes) {
      plane.row_bytes *= plane.rows;
      plane.rows = 1;
    }
    part.bytes += page_bytes(plane);  // cannot overflow: places in the arena do not overlap
    if (!part.planes.empty() && adjoins(part.planes.back(), plane)) {
      part.planes.back().row_bytes += plane.row_bytes;
    } else {
      part.planes.push_back(plane);
    }
  }
  return part;
}

Geometry Layout::geometry(Direction direction) const noexcept {
  const Part& part = direction == Direction::load ? loaded_ : stored_;
  return {part.planes.data(), static_cast<std::uint32_t>(part.planes.size()), num_blocks_,
          part.bytes};
}

void Layout::check(const Batch& batch) const {
  if (batch.n != 0 && (batch.blocks == nullptr || batch.offsets == nullptr)) {
    throw InvalidArgument("blocks or offsets is a null pointer");
  }
  if (batch.n > kMax / loaded_.bytes) {
    throw InvalidArgument(to_string(batch.n) + " copies of " + to_string(loaded_.bytes) +
                          " bytes do not fit 64 bits");
  }
  const std::uint64_t last_offset = arena_bytes_ - span_;
  for (std::uint64_t i = 0; i < batch.n; ++i) {
    if (batch.blocks[i] >= num_blocks_) {
      throw InvalidArgument("copy " + to_string(i) + ": block " + to_string(batch.blocks[i]) +
                            " is out of range, the engine has " + to_string(num_blocks_) +
                            " blocks");
    }
    if (batch.offsets[i] > last_offset) {
      throw InvalidArgument("copy " + to_string(i) + ": offset " + to_string(batch.offsets[i]) +
                            " is out of range, the last block of the arena starts at " +
                            to_string(last_offset));
    }
  }
}

}  // namespace flexkv
