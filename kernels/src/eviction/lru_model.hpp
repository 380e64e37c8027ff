// SPDX-License-Identifier: Apache-2.0
//
// The blocks that an LRU tier of the same size would hold, by digests of their keys: 22 bytes a block.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "blocks.hpp"
#include "numbers.hpp"

namespace flexkv::eviction {

// Keys are told apart by 64 bits: a wrong count, no wrong block. Each call takes O(1).
class LruModel {
 public:
  // Of a tier of `capacity` blocks, below 2^24. Throws std::bad_alloc.
  explicit LruModel(std::uint32_t capacity);

  void prefetch(const Key& key) const noexcept { numbers_.prefetch(key.low()); }

  // The number of the block, until it leaves; kNone if the tier would not have it.
  std::uint32_t find(const Key& key) const noexcept {
    return numbers_.find(key.low(), [&](std::uint32_t each) {
      return records_[each].high == key.high() && records_[each].low == key.low();
    });
  }

  // Whether the block of this number is among the blocks used last, of which there are as many as
  // `set_near` says.
  bool is_near(std::uint32_t number) const noexcept { return records_[number].near; }
  void set_near(std::uint32_t most) noexcept;

  // The tier has room for so many blocks from now on, up to the capacity.
  void set_most(std::uint32_t most) noexcept;

  // The block of this number becomes the one used last.
  void use(std::uint32_t number) noexcept;

  // A block that the tier would not have becomes the one used last; or, if `before` is no kNone, the
  // next after the block of that number, unless that one would leave first.
  void add(const Key& key, std::uint32_t before) noexcept;

  // The tier would have lost the block of this number, too.
  void lose(std::uint32_t number) noexcept;

  void clear() noexcept;

  std::size_t bytes() const noexcept {
    return records_.capacity() * sizeof(Record) + numbers_.bytes();
  }

 private:
  static constexpr std::uint32_t kEnd = 0xffffff;

  struct Record {
    std::uint32_t high;
    std::uint32_t low;
    std::uint32_t newer : 24;
    std::uint32_t near : 1;
    std::uint32_t older : 24;  // the next free one, of a record without a block
  };
  static_assert(sizeof(Record) == 16);

  static std::uint32_t number_of(std::uint32_t link) noexcept {
    return link == kEnd ? kNone : link;
  }
  void join(std::uint32_t newer, std::uint32_t older) noexcept;
  void enter(std::uint32_t newer, std::uint32_t number, std::uint32_t older) noexcept;
  void leave(std::uint32_t number) noexcept;
  void mark(std::uint32_t number, bool near) noexcept;

  std::vector<Record> records_;
  NumberTable numbers_;
  std::uint32_t most_;
  std::uint32_t size_ = 0;
  std::uint32_t free_ = kNone;
  std::uint32_t first_ = kNone;  // used last
  std::uint32_t last_ = kNone;
  std::uint32_t edge_ = kNone;  // of the near ones, the one used longest ago
  std::uint32_t near_ = 0;
  std::uint32_t most_near_ = 0;
};

}  // namespace flexkv::eviction
