// SPDX-License-Identifier: Apache-2.0
//
// Keys of blocks that are not in the tier, or not yet: eight bytes each, and no more than there is
// room for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "blocks.hpp"

namespace flexkv::eviction {

// What is known of an absent block. Keys are told apart by 58 bits at most, so one in some hundred
// million lookups finds another's: a wrong guess about a request, no wrong block.
struct Ghost {
  std::uint32_t tag : 26;
  std::uint32_t forks : 5;
  std::uint32_t kept : 1;  // leaves last
  std::uint32_t segment : 24;
  std::uint32_t generation : 8;
};
static_assert(sizeof(Ghost) == 8);

// Of the keys of a segment's blocks the first, the last and a 16th are remembered: most prompts go on
// where an earlier one ended, or leave it where it left another.
inline constexpr std::uint32_t kGhostSample = 16;

inline bool is_sampled(const Key& key) { return key.low() % kGhostSample == 0; }

// Buckets of eight, which is a line of the processor's cache. A full bucket drops a ghost.
class GhostTable {
 public:
  explicit GhostTable(std::uint32_t capacity) : ghosts_((capacity / kBucket + 1) * kBucket) {}

  // The ghost of this key, of any generation; null if there is none.
  Ghost* find(const Key& key) noexcept {
    Ghost* const bucket = bucket_of(key);
    for (std::size_t i = 0; i < kBucket; ++i) {
      if (bucket[i].generation != 0 && bucket[i].tag == key.high() >> kShift) {
        return &bucket[i];
      }
    }
    return nullptr;
  }

  // The ghost of this key, a new one if there was none. `worth(ghost)` says which of a full bucket
  // leaves: that of the lowest.
  template <typename Worth>
  Ghost& put(const Key& key, Worth worth) noexcept {
    if (Ghost* const known = find(key)) {
      return *known;
    }
    Ghost* const bucket = bucket_of(key);
    Ghost* chosen = bucket;
    std::uint32_t least = ~std::uint32_t{0};
    for (std::size_t i = 0; i < kBucket; ++i) {
      const std::uint32_t value = bucket[i].generation == 0 ? 0 : worth(bucket[i]);
      if (value < least) {
        least = value;
        chosen = &bucket[i];
      }
    }
    *chosen = Ghost{};
    chosen->tag = (key.high() >> kShift) & 0x3ffffff;
    return *chosen;
  }

  static void drop(Ghost& ghost) noexcept { ghost = Ghost{}; }

  void clear() noexcept { ghosts_.assign(ghosts_.size(), Ghost{}); }

  std::size_t bytes() const noexcept { return ghosts_.capacity() * sizeof(Ghost); }

 private:
  static constexpr std::size_t kBucket = 8;
  static constexpr std::uint32_t kShift = 6;

  Ghost* bucket_of(const Key& key) noexcept {
    return ghosts_.data() + scaled(key.low(), ghosts_.size() / kBucket) * kBucket;
  }

  std::vector<Ghost> ghosts_;  // of generation 0 where none is
};

}  // namespace flexkv::eviction
