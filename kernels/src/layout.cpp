// SPDX-License-Identifier: Apache-2.0
#include "layout.hpp"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <numeric>
#include <span>
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

// `start`: bytes of a block before it. Rows without gaps are one.
Plane normal_form(const fkv_plane& given, std::uint64_t start) {
  Plane plane{given.base,      given.block_stride, given.rows, given.row_stride,
              given.row_bytes, given.slot_offset,  start};
  if (plane.row_stride == plane.row_bytes) {
    plane.row_bytes *= plane.rows;
    plane.rows = 1;
  }
  return plane;
}

// Throws unless planes first .. first + count - 1 are some of `n_planes`; `what` wants them.
void check_range(const std::string& what, std::uint64_t first, std::uint64_t count,
                 std::uint64_t n_planes) {
  if (first > n_planes || count > n_planes - first) {
    throw InvalidArgument(what + " to copy " + to_string(count) + " planes from number " +
                          to_string(first) + " on, but there are " + to_string(n_planes));
  }
}

}  // namespace

Layout::Layout(const fkv_layout& layout)
    : num_blocks_(layout.num_blocks),
      arena_(static_cast<std::byte*>(layout.arena)),
      arena_bytes_(layout.arena_bytes),
      store_first_(layout.store_first),
      store_last_(layout.store_first + layout.store_count) {
  const std::span planes(layout.planes, layout.planes == nullptr ? 0 : layout.n_planes);
  if (planes.empty()) {
    throw InvalidArgument("no planes given, at least one is needed");
  }
  check_range("stores are", layout.store_first, layout.store_count, planes.size());
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
  planes_.reserve(planes.size());
  for (const fkv_plane& plane : planes) {
    planes_.push_back(normal_form(plane, bytes_before(n_planes())));
  }
}

std::uint64_t Layout::bytes_before(std::uint32_t plane) const noexcept {
  return plane == 0 ? 0 : planes_[plane - 1].start + page_bytes(planes_[plane - 1]);
}

Geometry Layout::part(std::uint32_t first, std::uint32_t last) const noexcept {
  return {planes_.data(), first, last, bytes_before(last) - bytes_before(first)};
}

Geometry Layout::geometry(const Batch& batch) const noexcept {
  std::uint32_t first = batch.first_plane;
  std::uint32_t last = first + batch.n_planes;
  if (batch.direction == Direction::store) {
    first = std::max(first, store_first_);
    last = std::max(first, std::min(last, store_last_));
  }
  return part(first, last);
}

void Layout::check(const Batch& batch) const {
  if (batch.n != 0 && (batch.blocks == nullptr || batch.offsets == nullptr)) {
    throw InvalidArgument("blocks or offsets is a null pointer");
  }
  check_range("the transfer is", batch.first_plane, batch.n_planes, n_planes());
  if (batch.n > kMax / block_bytes()) {
    throw InvalidArgument(to_string(batch.n) + " copies of " + to_string(block_bytes()) +
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
