// SPDX-License-Identifier: Apache-2.0
#include "blocks.hpp"

#include <bit>

namespace flexkv::eviction {

namespace {

// Slots for each two blocks. At a load of two thirds a key that is not there takes five probes,
// which read the slots alone.
constexpr std::size_t kSlotsOfTwo = 3;

}  // namespace

BlockTable::BlockTable(std::uint32_t capacity, BytesOf bytes_of)
    : bytes_of_(bytes_of),
      number_bits_(static_cast<std::uint32_t>(std::bit_width(capacity))),
      number_mask_((std::uint32_t{1} << number_bits_) - 1),
      blocks_(capacity),
      slots_(capacity * kSlotsOfTwo / 2 + 8) {
  free_all();
}

void BlockTable::free_all() noexcept {
  size_ = 0;
  free_ = kNone;
  for (std::size_t i = blocks_.size(); i-- > 0;) {
    blocks_[i].next = free_;
    free_ = static_cast<std::uint32_t>(i);
  }
}

std::uint32_t BlockTable::find(const Key& key) const noexcept {
  const std::uint32_t digest = key.high();
  const std::uint32_t tag = digest << number_bits_;
  for (std::size_t at = home(digest); slots_[at] != 0; at = after(at)) {
    if ((slots_[at] & ~number_mask_) != tag) {
      continue;
    }
    const std::uint32_t block = block_of(slots_[at]);
    const Block& found = blocks_[block];
    if (found.digest == digest && (found.key == key.object || bytes_of_(found.key) == key.bytes)) {
      return block;
    }
  }
  return kNone;
}

std::uint32_t BlockTable::add(const Key& key, std::uint32_t segment, std::uint32_t forks) noexcept {
  const std::uint32_t block = free_;
  Block& made = blocks_[block];
  free_ = made.next;
  made.key = key.object;
  made.digest = key.high();
  made.segment = segment & ((1u << 26) - 1);
  made.forks = forks & kMostForks;
  made.leaf = 0;
  made.previous = made.next = kNone;
  std::size_t at = home(made.digest);
  while (slots_[at] != 0) {
    at = after(at);
  }
  slots_[at] = tagged(block);
  ++size_;
  return block;
}

void BlockTable::remove(std::uint32_t block) noexcept {
  const std::uint32_t slot = tagged(block);
  std::size_t hole = home(blocks_[block].digest);
  while (slots_[hole] != slot) {
    hole = after(hole);
  }
  for (std::size_t at = after(hole); slots_[at] != 0; at = after(at)) {
    // It may move back unless its home lies behind the hole.
    const std::size_t first = home(blocks_[block_of(slots_[at])].digest);
    const bool behind = hole < at ? first > hole && first <= at : first > hole || first <= at;
    if (!behind) {
      slots_[hole] = slots_[at];
      hole = at;
    }
  }
  slots_[hole] = 0;
  blocks_[block].next = free_;
  free_ = block;
  --size_;
}

}  // namespace flexkv::eviction
