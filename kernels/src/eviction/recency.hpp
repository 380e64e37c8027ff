// SPDX-License-Identifier: Apache-2.0
//
// The blocks of a tier in the order of their last use: eight bytes a block.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "numbers.hpp"

namespace flexkv::eviction {

// Blocks by their numbers. The most recent ones, up to a number that may change, are *recent*: another
// order does not evict them.
class Recency {
 public:
  // For blocks below `capacity`, which is below 2^24. Throws std::bad_alloc.
  explicit Recency(std::uint32_t capacity) : links_(capacity) {}

  // The block is held, and becomes the one used last; or, if `before` is no kNone, the next after the
  // block `before`, which is listed.
  void add(std::uint32_t block, std::uint32_t before, bool fetched) noexcept {
    links_[block] = Link{};
    links_[block].fetched = fetched;
    if (before == kNone || !links_[before].listed) {
      enter_front(block);
    } else {
      enter_behind(block, before);
    }
  }

  // Reads the memory that `remove` will need.
  void prefetch(std::uint32_t block) const noexcept { __builtin_prefetch(&links_[block]); }

  void remove(std::uint32_t block) noexcept {
    if (links_[block].listed) {
      leave(block);
    }
  }

  // The block becomes the one used last.
  void use(std::uint32_t block) noexcept {
    if (links_[block].listed) {
      if (first_ == block) {
        return;
      }
      leave(block);
    }
    enter_front(block);
  }

  bool may_leave(std::uint32_t block) const noexcept { return links_[block].may_leave; }

  void set_may_leave(std::uint32_t block, bool may) noexcept {
    links_[block].may_leave = may;
    if (may && !links_[block].listed) {
      enter_last(block);
    }
  }

  // Whether the block came from a lower tier for a request that has not begun.
  bool fetched(std::uint32_t block) const noexcept { return links_[block].fetched; }
  void set_used(std::uint32_t block) noexcept { links_[block].fetched = 0; }

  bool is_recent(std::uint32_t block) const noexcept { return links_[block].recent; }

  // Calls `ended` with each block that is recent no longer, now that `most` are.
  template <typename Ended>
  void keep_recent(std::uint32_t most, Ended ended) {
    most_recent_ = most;
    while (recent_ > most) {
      const std::uint32_t block = mark_;
      links_[block].recent = 0;
      mark_ = newer_than(block);
      --recent_;
      ended(block);
    }
  }

  // The block used longest ago of those that may leave, or kNone. A block that may not leave is not
  // looked at again until it may.
  std::uint32_t oldest() noexcept {
    while (last_ != kNone && !links_[last_].may_leave) {
      leave(last_);
    }
    return last_;
  }

  void clear() noexcept {
    links_.assign(links_.size(), Link{});
    first_ = last_ = mark_ = kNone;
    recent_ = 0;
  }

  std::size_t bytes() const noexcept { return links_.capacity() * sizeof(Link); }

 private:
  static constexpr std::uint32_t kEnd = 0xffffff;

  struct Link {
    std::uint32_t newer : 24 = kEnd;
    std::uint32_t listed : 1 = 0;
    std::uint32_t recent : 1 = 0;
    std::uint32_t may_leave : 1 = 0;
    std::uint32_t fetched : 1 = 0;
    std::uint32_t older : 24 = kEnd;
  };
  static_assert(sizeof(Link) == 8);

  static std::uint32_t number(std::uint32_t link) noexcept { return link == kEnd ? kNone : link; }
  std::uint32_t newer_than(std::uint32_t block) const noexcept { return number(links_[block].newer); }
  std::uint32_t older_than(std::uint32_t block) const noexcept { return number(links_[block].older); }

  void join(std::uint32_t newer, std::uint32_t older) noexcept {
    if (newer == kNone) {
      first_ = older;
    } else {
      links_[newer].older = older & kEnd;
    }
    if (older == kNone) {
      last_ = newer;
    } else {
      links_[older].newer = newer & kEnd;
    }
  }

  void enter(std::uint32_t newer, std::uint32_t block, std::uint32_t older) noexcept {
    join(newer, block);
    join(block, older);
    links_[block].listed = 1;
  }

  void enter_front(std::uint32_t block) noexcept {
    enter(kNone, block, first_);
    links_[block].recent = 1;
    ++recent_;
    if (mark_ == kNone) {
      mark_ = block;
    }
  }

  void enter_behind(std::uint32_t block, std::uint32_t before) noexcept {
    const bool at_mark = mark_ == before;
    enter(before, block, older_than(before));
    if (links_[before].recent && (!at_mark || recent_ < most_recent_)) {
      links_[block].recent = 1;
      ++recent_;
      if (at_mark) {
        mark_ = block;
      }
    }
  }

  void enter_last(std::uint32_t block) noexcept { enter(last_, block, kNone); }

  void leave(std::uint32_t block) noexcept {
    Link& link = links_[block];
    if (link.recent) {
      link.recent = 0;
      --recent_;
      if (mark_ == block) {
        mark_ = newer_than(block);
      }
    }
    join(newer_than(block), older_than(block));
    link.listed = 0;
  }

  std::vector<Link> links_;
  std::uint32_t first_ = kNone;
  std::uint32_t last_ = kNone;
  std::uint32_t mark_ = kNone;  // the recent block that was used longest ago
  std::uint32_t recent_ = 0;
  std::uint32_t most_recent_ = 0;
};

}  // namespace flexkv::eviction
