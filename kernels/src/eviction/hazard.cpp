// SPDX-License-Identifier: Apache-2.0
//
// The lives of blocks; `prompts.cpp` has those of requests.
#include "hazard.hpp"

#include <algorithm>
#include <iterator>

#include "factors.hpp"

namespace flexkv::eviction {

namespace {

// For each block that the tier has room for: keys of absent blocks, segments, and segments with
// blocks in the tier. With 30 bytes for finding the block itself this is 63.6 bytes a block; the guard
// takes 30 more. Chosen on the first half of Mooncake's conversation trace, where memory without
// bounds (400 bytes a block) finds no more: segments of eight blocks on average are followed until
// six times as many blocks have come as the tier holds.
constexpr double kGhostShare = 1.2;
constexpr double kSegmentShare = 0.8;
constexpr double kLiveShare = 0.25;

// A tier of fewer blocks remembers as much as one of so many.
constexpr std::uint32_t kLeastCapacity = 256;

std::uint32_t scaled_capacity(std::uint32_t capacity, double share) {
  return static_cast<std::uint32_t>(std::max(capacity, kLeastCapacity) * share);
}

std::vector<std::vector<float>> priors() {
  std::vector<std::vector<float>> all;
  for (const std::size_t levels : {kKinds, kOutputs, kTurns, kLengths, kNews, kChildren, kParts}) {
    all.emplace_back(levels, 1.0F);
  }
  all.emplace_back(std::begin(kHintPriors), std::end(kHintPriors));
  return all;
}

}  // namespace

Hazard::Hazard(std::uint32_t capacity, BlockTable::BytesOf bytes_of)
    : rates_(priors()),
      blocks_(capacity, bytes_of),
      ghosts_(scaled_capacity(capacity, kGhostShare)),
      segments_(rates_, scaled_capacity(capacity, kSegmentShare),
                std::min(capacity, scaled_capacity(capacity, kLiveShare))),
      recency_(capacity),
      guard_(capacity) {}

void Hazard::forget_all() {
  ghosts_.clear();
  segments_.clear();
  recency_.clear();
  guard_.clear();
  running_.clear();
  sessions_.clear();
  session_ring_.clear();
  session_next_ = 0;
}

void Hazard::advance(double now) {
  if (start_ < 0) {
    start_ = now_ = learned_now_ = now;
  }
  now_ = std::max(now_, now);  // ages would wrap if the time fell
  const double ticks = (now_ - start_) * static_cast<double>(Segments::kTicksOfSecond);
  segments_.advance(static_cast<std::uint32_t>(static_cast<std::uint64_t>(ticks)));
}

std::uint32_t Hazard::owner_of(const Ghost* ghost) noexcept {
  if (ghost == nullptr || segments_[ghost->segment].generation != ghost->generation ||
      !segments_[ghost->segment].used) {
    return kNone;
  }
  return ghost->segment;
}

std::uint32_t Hazard::owner_of(const Key& key) noexcept {
  const std::uint32_t block = blocks_.find(key);
  return block == kNone ? owner_of(ghosts_.find(key)) : blocks_[block].segment;
}

std::uint32_t Hazard::forks_of(const Key& key) noexcept {
  const std::uint32_t block = blocks_.find(key);
  if (block != kNone) {
    return blocks_[block].forks;
  }
  const Ghost* const ghost = ghosts_.find(key);
  return ghost == nullptr ? 0 : ghost->forks;
}

// A block of a segment has left it.
void Hazard::leave(std::uint32_t id) {
  Live& live = segments_.live_of(id);
  if (--live.cached > 0) {
    return;
  }
  segments_.bury(id);
}

std::uint32_t Hazard::inserted(const Key& key, const Key* after, std::uint32_t before,
                               bool fetched) {
  if (blocks_.full()) {
    return kNone;
  }
  Ghost* const ghost = ghosts_.find(key);
  std::uint32_t id = owner_of(ghost);
  std::uint32_t forks = 0;
  if (ghost != nullptr) {
    forks = id == kNone ? 0 : ghost->forks;
    GhostTable::drop(*ghost);
  }
  if (id == kNone && before != kNone) {
    id = blocks_[before].segment;  // of an answer, or of another group of layers
    segments_[id].length = clipped(segments_[id].length + 1U);
  }
  if (id == kNone || (segments_[id].live == kNone && !segments_.can_live())) {
    id = segments_.can_live() ? adopt() : segments_.newest();
  }
  if (segments_[id].live == kNone) {
    segments_.enliven(id);
  }
  ++segments_.live_of(id).cached;
  const std::uint32_t block = blocks_.add(key, id, forks);
  recency_.add(block, before, fetched);
  end_immunity();
  if (!fetched) {
    guard_.stored(key, after);
  }
  return block;
}

// A segment for one block of an unknown request.
std::uint32_t Hazard::adopt() {
  const std::uint32_t id = segments_.make();
  segments_[id].length = 1;
  segments_[id].prompt = 1;
  segments_[id].unknown = true;
  segments_.place(id, rates_.class_of(Factors{}));
  return id;
}

void Hazard::held(std::uint32_t block) {
  recency_.set_may_leave(block, false);
  if (blocks_[block].leaf) {
    remove_leaf(block);
  }
}

void Hazard::released(std::uint32_t block) {
  recency_.set_may_leave(block, true);
  if (!blocks_[block].leaf && !is_immune(block)) {
    add_leaf(block);
  }
}

// The blocks used last, but for those of which a client said that they do not come back.
bool Hazard::is_immune(std::uint32_t block) noexcept {
  return recency_.is_recent(block) && !is_leaving(blocks_[block].segment);
}

bool Hazard::is_leaving(std::uint32_t id) noexcept {
  const Factors& factors = rates_.factors_of(segments_[id].number);
  return factors[kHint] == static_cast<std::uint8_t>(Hint::leaves);
}

void* Hazard::evicted(std::uint32_t block, const Key& key, bool lost) {
  Block& one = blocks_[block];
  if (one.leaf) {
    remove_leaf(block);
  }
  const std::uint32_t id = one.segment;
  const std::uint32_t forks = one.forks;
  void* const object = one.key;
  recency_.remove(block);
  blocks_.remove(block);
  if (lost) {
    guard_.lost(key);
  }
  const std::uint32_t cached = segments_.cached(id);
  const bool end = cached == segments_[id].length || cached == 1;
  if (end || forks > 0 || is_sampled(key)) {
    Ghost& ghost = put_ghost(key, id);
    ghost.forks = forks & kMostForks;
    ghost.kept = true;
  }
  leave(id);
  return object;
}

void* Hazard::victim() {
  if (guard_.trusts_hazard()) {
    if (const std::uint32_t id = segments_.lowest(); id != kNone) {
      return blocks_[segments_.live_of(id).leaves].key;
    }
  }
  const std::uint32_t block = recency_.oldest();
  return block == kNone ? nullptr : blocks_[block].key;
}

// Hazard's order may evict the blocks again that are not among the most recent ones any more.
void Hazard::end_immunity() {
  recency_.keep_recent(guard_.immune(), [&](std::uint32_t block) {
    if (recency_.may_leave(block) && !blocks_[block].leaf) {
      add_leaf(block);
    }
  });
}

void Hazard::add_leaf(std::uint32_t block) {
  Block& one = blocks_[block];
  Live& live = segments_.live_of(one.segment);
  one.leaf = 1;
  if (live.leaves == kNone) {
    one.previous = one.next = live.leaves = block;
  } else {
    Block& first = blocks_[live.leaves];
    one.previous = first.previous;
    one.next = live.leaves;
    blocks_[first.previous].next = block;
    first.previous = block;
  }
  segments_.open(one.segment);
}

void Hazard::remove_leaf(std::uint32_t block) {
  Block& one = blocks_[block];
  Live& live = segments_.live_of(one.segment);
  one.leaf = 0;
  blocks_[one.previous].next = one.next;
  blocks_[one.next].previous = one.previous;
  if (live.leaves == block) {
    live.leaves = one.next == block ? kNone : one.next;
  }
}

Ghost& Hazard::put_ghost(const Key& key, std::uint32_t id) {
  const auto total = static_cast<std::uint32_t>(segments_.size());
  Ghost& ghost = ghosts_.put(key, [&](const Ghost& each) -> std::uint32_t {
    if (owner_of(&each) == kNone) {
      return 0;
    }
    return 1 + total - segments_.made_since(each.segment) + (each.kept ? total / 2 : 0);
  });
  ghost.segment = id & 0xffffff;
  ghost.generation = segments_[id].generation;
  return ghost;
}

std::size_t Hazard::bytes() const noexcept {
  return blocks_.bytes() + ghosts_.bytes() + segments_.bytes() + recency_.bytes() + guard_.bytes();
}

}  // namespace flexkv::eviction
