// SPDX-License-Identifier: Apache-2.0
//
// What requests do to segments.
#include <algorithm>
#include <bit>
#include <utility>

#include "factors.hpp"
#include "hazard.hpp"

namespace flexkv::eviction {

namespace {

// Rates are learned again after so many requests, or a 16th of all so far, up to a thousand.
constexpr std::uint32_t kLearnRequests = 50;
constexpr std::uint32_t kLearnShare = 16;
constexpr std::uint32_t kLearnMost = 1000;

// Bounds of what clients can have it remember: a request that never ends, a name of a session.
constexpr std::size_t kMostRunning = 1 << 16;
constexpr std::size_t kMostSessions = 1 << 16;

// Keys that are found at a time, so that the processor reads the memory of all of them at once.
constexpr std::size_t kAtOnce = 32;

}  // namespace

struct Hazard::Shape {
  std::uint32_t known;  // blocks, in the tier or not
  std::uint8_t turn;
  Factors factors;  // those that all its segments share
  Level level;
};

void Hazard::find_all(std::span<const Key> keys) noexcept {
  found_.resize(keys.size());
  for (std::size_t start = 0; start < keys.size(); start += kAtOnce) {
    const std::size_t stop = std::min(start + kAtOnce, keys.size());
    for (std::size_t i = start; i < stop; ++i) {
      blocks_.prefetch(keys[i]);
    }
    for (std::size_t i = start; i < stop; ++i) {
      found_[i] = blocks_.find(keys[i]);
    }
  }
}

// The guard counts what the request found, and its blocks become the ones used last.
void Hazard::count_hits(std::span<const Key> keys) {
  std::size_t hits = 0;
  while (hits < keys.size() && found_[hits] != kNone && !recency_.fetched(found_[hits])) {
    ++hits;
  }
  guard_.began(keys, hits, [&](std::size_t i) { return found_[i] != kNone; });
  for (std::size_t i = keys.size(); i-- > 0;) {
    const std::uint32_t block = found_[i];
    if (block != kNone) {
      if (blocks_[block].leaf) {
        remove_leaf(block);
      }
      recency_.set_used(block);
      recency_.use(block);
      end_immunity();
      if (recency_.may_leave(block) && !blocks_[block].leaf && !is_immune(block)) {
        add_leaf(block);
      }
    }
  }
}

std::uint32_t Hazard::known_blocks(std::span<const Key> keys) noexcept {
  std::size_t count = keys.size();
  while (count > 0 && found_[count - 1] == kNone && owner_of(ghosts_.find(keys[count - 1])) == kNone) {
    --count;
  }
  return static_cast<std::uint32_t>(count);
}

void Hazard::began(std::span<const Key> keys, const Request& request, double now) {
  const std::string id(request.id);
  if (keys.empty() || (!id.empty() && running_.contains(id))) {
    return;  // the latter was preempted
  }
  advance(now);
  find_all(keys);
  const Shape shape = shape_of(keys, known_blocks(keys), request);
  take_over(keys, shape);
  std::vector<Name> made;
  for (const Piece& piece : pieces_) {
    const std::uint32_t segment = own(piece, keys, shape);
    made.push_back({segment, segments_[segment].generation});
  }
  end_takes();
  count_hits(keys);
  if (!id.empty()) {
    if (running_.size() == kMostRunning) {
      running_.clear();
    }
    running_.emplace(id, std::move(made));
  }
  ++requests_;
  const std::uint32_t since = requests_ - learned_at_;
  if (!segments_.is_learning() &&
      since >= std::clamp(learned_at_ / kLearnShare, kLearnRequests, kLearnMost)) {
    segments_.learn(since);
    learned_at_ = requests_;
    guard_.set_clock_runs(now_ > std::exchange(learned_now_, now_));
  }
  segments_.learn_on();
  if (!segments_.is_learning() && surprises_ != rates_.surprises()) {
    surprises_ = rates_.surprises();
    guard_.set_surprised();
  }
}

Hazard::Shape Hazard::shape_of(std::span<const Key> keys, std::uint32_t known,
                               const Request& request) {
  const auto blocks = static_cast<std::uint32_t>(keys.size());
  std::uint8_t turn = 0;
  if (known > 0) {
    const Key& last = keys[known - 1];
    const Segment& parent = segments_[owner_of(last)];
    if (known > 1 && known >= parent.prompt) {
      turn = static_cast<std::uint8_t>(std::min(parent.turn + 1, 0xff));
    }
    const std::uint32_t forks = forks_of(last);
    if (known < blocks && (known < parent.prompt || forks > 0) && forks < kMostForks) {
      if (const std::uint32_t block = blocks_.find(last); block != kNone) {
        blocks_[block].forks = (forks + 1) & kMostForks;
      } else {
        ghosts_.find(last)->forks = (forks + 1) & kMostForks;
      }
    }
  }
  if (!request.session.empty()) {
    turn = next_turn(request.session, turn);
  }
  const auto news = turn > 0 ? std::min<std::uint32_t>(
                                   static_cast<std::uint32_t>(std::bit_width(blocks - known)), 5)
                             : 6U + (known > 1);
  return {known,
          turn,
          {0, 0, turn_level(turn), log2_level(blocks), static_cast<std::uint8_t>(news), 0, 0,
           static_cast<std::uint8_t>(request.hint)},
          request.level};
}

// The turn of a session's request whose prompt shows at least `turn`.
std::uint8_t Hazard::next_turn(std::string_view session, std::uint8_t turn) {
  const std::uint64_t name = std::hash<std::string_view>{}(session);
  if (const auto known = sessions_.find(name); known != sessions_.end()) {
    turn = static_cast<std::uint8_t>(std::max<int>(turn, std::min(known->second + 1, 0xff)));
    known->second = turn;
    return turn;
  }
  if (session_ring_.size() < kMostSessions) {
    session_ring_.push_back(name);
  } else {
    sessions_.erase(std::exchange(session_ring_[session_next_], name));
    session_next_ = (session_next_ + 1) % kMostSessions;
  }
  sessions_.emplace(name, turn);
  return turn;
}

// Split a prompt into pieces, and take its known blocks from those that they belonged to.
void Hazard::take_over(std::span<const Key> keys, const Shape& shape) {
  pieces_.clear();
  taken_.clear();
  const auto body = static_cast<std::uint8_t>(kBody + std::min<int>(shape.turn, 2));
  const auto blocks = static_cast<std::uint32_t>(keys.size());
  if (shape.known < blocks) {
    pieces_.push_back({shape.known, blocks, body, 0, shape.known > 0 ? kFresh : kWhole});
  }
  std::uint32_t stop = shape.known;
  bool begun = false;
  while (stop > 0) {
    const Key& last = keys[stop - 1];
    const std::uint32_t owner = owner_of(last);
    std::uint32_t start = stop - 1;
    if (owner != kNone) {
      Segment& segment = segments_[owner];
      if (segment.unknown && segment.length == 1) {
        segment.start = clipped(start);  // its place in a prompt is known now
      }
      if (segment.start < stop && stop <= segment.stop()) {
        start = segment.start;
        take_from(owner, stop);
      }
    }
    const std::uint32_t children = forks_of(last) + 1;
    if (children > 1 || !begun) {
      const int kind = children > 1 ? kTrunk + (children >= 4) + (children >= 16) : body;
      pieces_.push_back({stop, stop, static_cast<std::uint8_t>(kind), log2_level(children), kOld});
      begun = true;
    }
    pieces_.back().start = start;
    stop = start;
  }
}

void Hazard::take_from(std::uint32_t owner, std::uint32_t stop) {
  Segment& segment = segments_[owner];
  const std::uint32_t count = stop - segment.start;
  const float share = static_cast<float>(count) / static_cast<float>(segment.length);
  segments_.note(owner, segment.weight() * share);
  segment.length = static_cast<std::uint16_t>(segment.length - count);
  segment.start = clipped(stop);
  taken_.push_back({owner, segment.generation});
}

// What was left behind belongs to no request any more.
void Hazard::end_takes() {
  for (const Name& name : taken_) {
    Segment& segment = segments_[name.id];
    if (!segment.used || segment.generation != name.generation) {
      continue;
    }
    const std::uint32_t cached = segments_.cached(name.id);
    if (segment.length == 0 && cached == 0) {
      segments_.free(name.id);
      continue;
    }
    segment.length = std::max(segment.length, clipped(cached));
    supersede(name.id);
  }
}

void Hazard::supersede(std::uint32_t id) {
  segments_[id].superseded = true;
  Factors factors{};
  factors[0] = kSuperseded;
  factors[2] = turn_level(segments_[id].turn);
  if (is_leaving(id)) {
    factors[kHint] = static_cast<std::uint8_t>(Hint::leaves);
  }
  segments_.place(id, rates_.class_of(factors));
}

std::uint32_t Hazard::own(const Piece& piece, std::span<const Key> keys, const Shape& shape) {
  const std::uint32_t id = segments_.make();
  Segment& segment = segments_[id];
  segment.start = clipped(piece.start);
  segment.length = clipped(piece.stop - piece.start);
  segment.prompt = clipped(static_cast<std::uint32_t>(keys.size()));
  segment.turn = shape.turn;
  // The prompts of others begin with a trunk, too: a low priority does not count there.
  const bool spared = piece.kind >= kTrunk && shape.level == kLower;
  segments_.set_level(id, spared ? kUsual : shape.level);
  Factors factors = shape.factors;
  factors[0] = piece.kind;
  factors[1] = kUsualOutput;
  factors[5] = piece.children;
  factors[6] = piece.part;
  if (piece.kind > kTrunk && factors[kHint] == static_cast<std::uint8_t>(Hint::leaves)) {
    factors[kHint] = 0;  // the prompts of others begin with it, too
  }
  segments_.place(id, rates_.class_of(factors));
  for (std::uint32_t i = piece.start; i < piece.stop; ++i) {
    const std::uint32_t block = found_[i];
    if (block != kNone) {
      move_block(block, id);
    } else {
      put_ghost(keys[i], id).kept = is_sampled(keys[i]) || i == piece.start || i + 1 == piece.stop;
    }
  }
  return id;
}

void Hazard::move_block(std::uint32_t block, std::uint32_t id) {
  Block& one = blocks_[block];
  const std::uint32_t old = one.segment;
  if (old == id || (segments_[id].live == kNone && !segments_.can_live())) {
    return;  // the latter has no room: the block stays where it is
  }
  const bool leaf = one.leaf;
  if (leaf) {
    remove_leaf(block);
  }
  if (segments_[id].live == kNone) {
    segments_.enliven(id);
  }
  one.segment = id & ((1U << 26) - 1);
  ++segments_.live_of(id).cached;
  if (leaf) {
    add_leaf(block);
  }
  leave(old);
}

void Hazard::ended(std::string_view id, std::uint32_t output_tokens, double now) {
  advance(now);
  segments_.learn_on();
  const auto found = running_.find(std::string(id));
  if (found == running_.end()) {
    return;
  }
  const std::uint8_t output = output_level(output_tokens);
  for (const Name& name : found->second) {
    const Segment& segment = segments_[name.id];
    if (segment.used && segment.generation == name.generation && !segment.superseded) {
      Factors factors = rates_.factors_of(segment.number);
      factors[1] = output;
      segments_.place(name.id, rates_.class_of(factors));
    }
  }
  running_.erase(found);
}

}  // namespace flexkv::eviction
