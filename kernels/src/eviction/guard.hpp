// SPDX-License-Identifier: Apache-2.0
//
// Keeps `hazard` from finding fewer blocks than LRU would: whose order rules, and which blocks another
// order than that of use must not evict.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "lru_model.hpp"

namespace flexkv::eviction {

// Sums since the start.
struct GuardCounts {
  std::uint64_t hits = 0;      // blocks that requests found
  std::uint64_t lru_hits = 0;  // blocks that they would have found with LRU
  std::uint64_t switches = 0;  // from hazard's order to LRU's
};

// Credit, in blocks, is what hazard's order has found more than LRU would have. It has an upper bound,
// so that what was gained long ago does not pay for losses now. When it is spent, LRU's order rules
// until the blocks kept by it have earned credit again. The tier stays one: a switch copies nothing.
//
// The blocks used last are immune from hazard's order. Their number follows what that order loses.
class Guard {
 public:
  // For a tier of `capacity` blocks. Throws std::bad_alloc.
  explicit Guard(std::uint32_t capacity);

  // The tier has room for so many blocks from now on, up to the capacity: an LRU tier of this size
  // would keep as many.
  void set_room(std::uint32_t blocks) noexcept;

  // A request begins with the prompt `keys`. Of these `hits`, from the first on, were in the tier when
  // it came. `in_tier(i)` says whether the tier has the i-th now. Counts it before LRU's order changes.
  template <typename InTier>
  void began(std::span<const Key> keys, std::size_t hits, InTier in_tier) {
    count(keys, hits);
    for (std::size_t i = keys.size(); i-- > 0;) {
      if (const std::uint32_t number = lru_.find(keys[i]); number != kNone) {
        lru_.use(number);
      } else if (in_tier(i)) {
        lru_.add(keys[i], kNone);  // LRU would have stored it again
      }
    }
  }

  // A block was stored, which builds on the block of `after` if that is not null.
  void stored(const Key& key, const Key* after) noexcept;

  // A block was lost that was no victim. LRU would have lost it, too.
  void lost(const Key& key) noexcept;

  // Whether hazard's order rules, and not LRU's.
  bool trusts_hazard() const noexcept { return trusts_ && clock_runs_; }

  // Blocks come back that were not expected to. While LRU's order rules, hazard's returns sooner.
  void set_surprised() noexcept { surprised_ = !trusts_; }

  // Whether time has passed since rates were learned before. If not, no age tells blocks apart.
  void set_clock_runs(bool runs) noexcept { clock_runs_ = runs; }

  // How many of the blocks used last are immune.
  std::uint32_t immune() const noexcept { return immune_; }

  double credit() const noexcept { return credit_; }
  const GuardCounts& counts() const noexcept { return counts_; }

  void clear() noexcept { lru_.clear(); }

  std::size_t bytes() const noexcept { return lru_.bytes(); }

 private:
  void count(std::span<const Key> keys, std::size_t hits) noexcept;
  bool may_try() const noexcept;
  void settle(std::size_t hits, std::size_t lru_hits) noexcept;

  LruModel lru_;
  std::uint32_t capacity_;
  std::uint32_t least_immune_;
  std::uint32_t most_immune_;
  std::uint32_t immune_;
  double credit_;
  bool trusts_ = true;
  bool surprised_ = false;
  bool clock_runs_ = true;
  GuardCounts counts_;
  std::uint64_t lru_hits_then_ = 0;  // when LRU's order took over
};

}  // namespace flexkv::eviction
