// SPDX-License-Identifier: Apache-2.0
#include "guard.hpp"

#include <algorithm>

namespace flexkv::eviction {

namespace {

// Shares of the capacity. Chosen on Mooncake's conversation trace and on made-up workloads that hazard
// loses on; `docs/pages/design/eviction.md` has the hits of all.
constexpr double kMostCredit = 0.25;
constexpr double kTrialCredit = 0.04;  // with which hazard's order begins, and returns
constexpr double kSurpriseCredit = 0.01;  // with which it returns after a surprise, at least
constexpr double kLeastImmune = 0.01;
constexpr double kMostImmune = 0.95;

// After a surprise hazard's order returns once LRU has found as many blocks as so many memories hold.
constexpr double kSurpriseMemories = 4;

// Of LRU's hits, what hazard may lose for good: without it a tie would end in LRU's order.
constexpr double kLossShare = 0.005;

std::uint32_t share_of(std::uint32_t capacity, double share) {
  return static_cast<std::uint32_t>(capacity * share);
}

}  // namespace

Guard::Guard(std::uint32_t capacity)
    : lru_(capacity),
      capacity_(capacity),
      least_immune_(share_of(capacity, kLeastImmune)),
      most_immune_(share_of(capacity, kMostImmune)),
      immune_(least_immune_),
      credit_(kTrialCredit * capacity) {
  lru_.set_near(immune_);
}

void Guard::set_room(std::uint32_t blocks) noexcept {
  capacity_ = blocks;
  if (counts_.hits == 0 && counts_.lru_hits == 0) {
    credit_ = kTrialCredit * blocks;
  }
  least_immune_ = share_of(blocks, kLeastImmune);
  most_immune_ = share_of(blocks, kMostImmune);
  immune_ = std::clamp(immune_, least_immune_, most_immune_);
  lru_.set_most(blocks);
  lru_.set_near(immune_);
}

void Guard::count(std::span<const Key> keys, std::size_t hits) noexcept {
  std::size_t lru_hits = 0;
  std::int64_t immune = immune_;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const std::uint32_t number = lru_hits == i ? lru_.find(keys[i]) : kNone;
    const bool has = number != kNone;
    lru_hits += has;
    if (i < hits && !has) {
      --immune;
    } else if (i >= hits && has && !lru_.is_near(number)) {
      ++immune;
    } else if (i >= hits && !has) {
      break;
    }
  }
  immune_ = static_cast<std::uint32_t>(
      std::clamp<std::int64_t>(immune, least_immune_, most_immune_));
  lru_.set_near(immune_);
  settle(hits, lru_hits);
}

void Guard::settle(std::size_t hits, std::size_t lru_hits) noexcept {
  counts_.hits += hits;
  counts_.lru_hits += lru_hits;
  const double lru = static_cast<double>(lru_hits);
  credit_ = std::min(kMostCredit * capacity_,
                     credit_ + static_cast<double>(hits) - lru + kLossShare * lru);
  if (trusts_ && credit_ < 0) {
    trusts_ = false;
    credit_ = 0;
    ++counts_.switches;
    lru_hits_then_ = counts_.lru_hits;
  } else if (!trusts_ && (credit_ >= kTrialCredit * capacity_ || may_try())) {
    trusts_ = true;
    surprised_ = false;
    credit_ = std::max(credit_, kSurpriseCredit * capacity_);
  }
}

// Whether there was a surprise, and LRU's order has ruled for so long that a trial costs little.
bool Guard::may_try() const noexcept {
  const auto hits = static_cast<double>(counts_.lru_hits - lru_hits_then_);
  return surprised_ && hits >= kSurpriseMemories * capacity_;
}

void Guard::stored(const Key& key, const Key* after) noexcept {
  const std::uint32_t before = after == nullptr ? kNone : lru_.find(*after);
  const bool is_reached = after == nullptr || before != kNone;
  if (is_reached && lru_.find(key) == kNone) {
    lru_.add(key, before);
  }
}

void Guard::lost(const Key& key) noexcept {
  if (const std::uint32_t number = lru_.find(key); number != kNone) {
    lru_.lose(number);
  }
}

}  // namespace flexkv::eviction
