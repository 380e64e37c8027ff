// SPDX-License-Identifier: Apache-2.0
#include "layout.hpp"

#include <cstddef>
#include <limits>
#include <string>

namespace flexkv {
namespace {

using std::to_string;

constexpr std::uint64_t kMax = std::numeric_limits<std::uint64_t>::max();

void check_plane(const fkv_plane& plane, std::size_t number, std::uint64_t num_blocks) {
  const std::string where = "plane " + to_string(number) + ": ";
  if (plane.base == 0) {
    throw InvalidArgument(where + "base is a null pointer");
  }
  if (plane.page_bytes == 0) {
    throw InvalidArgument(where + "page_bytes is 0, it must be at least 1");
  }
  if (plane.block_stride < plane.page_bytes) {
    throw InvalidArgument(where + "block_stride " + to_string(plane.block_stride) +
                          " is smaller than page_bytes " + to_string(plane.page_bytes));
  }
  const std::uint64_t room = kMax - plane.base;
  if (plane.page_bytes > room || (room - plane.page_bytes) / plane.block_stride < num_blocks - 1) {
    throw InvalidArgument(where + to_string(num_blocks) + " blocks of stride " +
                          to_string(plane.block_stride) + " from address " + to_string(plane.base) +
                          " pass the end of the address space");
  }
}

}  // namespace

Layout::Layout(std::span<const fkv_plane> planes, std::uint64_t num_blocks, void* arena,
               std::uint64_t arena_bytes)
    : num_blocks_(num_blocks), arena_(static_cast<std::byte*>(arena)), arena_bytes_(arena_bytes) {
  if (planes.empty()) {
    throw InvalidArgument("no planes given, at least one is needed");
  }
  if (num_blocks == 0) {
    throw InvalidArgument("num_blocks is 0, it must be at least 1");
  }
  if (arena == nullptr) {
    throw InvalidArgument("the arena is a null pointer");
  }
  if (arena_bytes > kMax - reinterpret_cast<std::uintptr_t>(arena)) {
    throw InvalidArgument("an arena of " + to_string(arena_bytes) +
                          " bytes passes the end of the address space");
  }
  planes_.reserve(planes.size());
  for (std::size_t i = 0; i < planes.size(); ++i) {
    check_plane(planes[i], i, num_blocks);
    if (planes[i].page_bytes > kMax - block_bytes_) {
      throw InvalidArgument("plane " + to_string(i) + ": the block's bytes do not fit 64 bits");
    }
    const Plane plane{planes[i].base, planes[i].block_stride, planes[i].page_bytes, block_bytes_};
    block_bytes_ += plane.page_bytes;
    if (!planes_.empty() && adjoins(planes_.back(), plane)) {
      planes_.back().page_bytes += plane.page_bytes;
    } else {
      planes_.push_back(plane);
    }
  }
  if (arena_bytes < block_bytes_) {
    throw InvalidArgument("an arena of " + to_string(arena_bytes) +
                          " bytes cannot hold one block of " + to_string(block_bytes_) + " bytes");
  }
}

Geometry Layout::geometry() const noexcept {
  return {planes_.data(), static_cast<std::uint32_t>(planes_.size()), num_blocks_, block_bytes_};
}

void Layout::check(const Batch& batch) const {
  if (batch.n != 0 && (batch.blocks == nullptr || batch.offsets == nullptr)) {
    throw InvalidArgument("blocks or offsets is a null pointer");
  }
  if (batch.n > kMax / block_bytes_) {
    throw InvalidArgument(to_string(batch.n) + " copies of " + to_string(block_bytes_) +
                          " bytes do not fit 64 bits");
  }
  const std::uint64_t last_offset = arena_bytes_ - block_bytes_;
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
