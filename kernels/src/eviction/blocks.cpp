// SPDX-License-Identifier: Apache-2.0
#include "blocks.hpp"

namespace flexkv::eviction {

BlockTable::BlockTable(std::uint32_t capacity, BytesOf bytes_of)
    : bytes_of_(bytes_of), blocks_(capacity), numbers_(capacity) {
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
  return numbers_.find(key.high(), [&](std::uint32_t block) {
    const Block& found = blocks_[block];
    return found.digest == key.high() &&
           (found.key == key.object || bytes_of_(found.key) == key.bytes);
  });
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
  numbers_.add(made.digest, block);
  ++size_;
  return block;
}

void BlockTable::remove(std::uint32_t block) noexcept {
  numbers_.remove(block, [&](std::uint32_t each) { return blocks_[each].digest; });
  blocks_[block].next = free_;
  free_ = block;
  --size_;
}

}  // namespace flexkv::eviction
