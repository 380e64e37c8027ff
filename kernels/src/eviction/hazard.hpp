// SPDX-License-Identifier: Apache-2.0
//
// FlexKV's own eviction policy: keep what is likely to come back soon for the time that it is kept.
//
// What tells whether a block comes back is the request that it came from: which turn of a
// conversation, how long, how much of it was new, how long the answer, and how long ago. How soon
// blocks of each such class come back is learned while they are served. The block that leaves is the
// one of which the fewest hits are expected per second of keeping it.
//
// The blocks of a prompt are split into segments: pieces of a trunk, each up to a block where prompts
// of others go on differently; the rest of what was known before; and what is new. A block belongs to
// the last request that used it. If a later request uses only the beginning of a segment, the rest is
// superseded. No block is refused: the blocks of a request compete once they are stored. A guard keeps
// the policy from finding less than LRU would; see `guard.hpp`.
//
// Amortised O(1) a block. Deterministic: the time is passed in. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "blocks.hpp"
#include "ghosts.hpp"
#include "guard.hpp"
#include "rates.hpp"
#include "recency.hpp"
#include "segments.hpp"

namespace flexkv::eviction {

enum class Hint : std::uint8_t { none, returns, leaves, session };

// What is known of a request.
struct Request {
  std::string_view id;       // empty if it has none
  std::string_view session;  // empty if its client did not say
  Hint hint = Hint::none;
  Level level = kUsual;
};

class Hazard {
 public:
  // For a tier of `capacity` blocks. Throws std::bad_alloc.
  Hazard(std::uint32_t capacity, BlockTable::BytesOf bytes_of);

  // See flexkv.eviction.EvictionPolicy. Each throws std::bad_alloc; `now` is in seconds. A time before
  // an earlier one counts as that.
  void began(std::span<const Key> keys, const Request& request, double now);
  void ended(std::string_view id, std::uint32_t output_tokens, double now);

  // The number of the block of this key, which names it until it leaves; kNone without one.
  std::uint32_t find(const Key& key) const noexcept { return blocks_.find(key); }

  // The number of a new block; kNone if the tier has no room for it. It was not there, and builds on
  // the block of `after` unless that is null, whose number is `before`, or kNone if it is not there. A
  // block that was `fetched` came from a lower tier: the next request that finds it does not count as
  // a hit.
  std::uint32_t inserted(const Key& key, const Key* after, std::uint32_t before, bool fetched);

  void held(std::uint32_t block);
  void released(std::uint32_t block);

  // Reads the memory that `evicted` will need: for the block that leaves after the next one, and for
  // the next one.
  void prefetch_second(std::uint32_t block) const noexcept {
    blocks_.prefetch_record(block);
    recency_.prefetch(block);
  }
  void prefetch_next(std::uint32_t block) const noexcept { blocks_.prefetch_place(block); }

  // The object that the block's key, which is `key`, came with. A block is `lost` if it leaves for
  // another reason than its order.
  void* evicted(std::uint32_t block, const Key& key, bool lost);

  // The object of the next one to leave, or null.
  void* victim();

  // The tier has room for so many blocks from now on, up to the capacity.
  void set_room(std::uint32_t blocks) noexcept { guard_.set_room(blocks); }

  const Guard& guard() const noexcept { return guard_; }

  template <typename Drop>
  void clear(Drop drop) {
    blocks_.clear(drop);
    forget_all();
  }

  std::uint32_t size() const noexcept { return blocks_.size(); }

  // From now on. There is no block.
  void read_keys_by(BlockTable::BytesOf bytes_of) noexcept { blocks_.read_keys_by(bytes_of); }

  // Of all that grows with the capacity; and of what is learned, which does not.
  std::size_t bytes() const noexcept;
  std::size_t learned_bytes() const noexcept { return rates_.bytes(); }

 private:
  struct Piece {
    std::uint32_t start;
    std::uint32_t stop;
    std::uint8_t kind;
    std::uint8_t children;
    std::uint8_t part;
  };
  struct Name {
    std::uint32_t id;
    std::uint8_t generation;
  };
  struct Shape;  // of a request

  void advance(double now);
  std::uint32_t owner_of(const Ghost* ghost) noexcept;
  std::uint32_t owner_of(const Key& key) noexcept;
  std::uint32_t forks_of(const Key& key) noexcept;
  void find_all(std::span<const Key> keys) noexcept;
  void count_hits(std::span<const Key> keys);
  std::uint32_t known_blocks(std::span<const Key> keys) noexcept;
  Shape shape_of(std::span<const Key> keys, std::uint32_t known, const Request& request);
  std::uint8_t next_turn(std::string_view session, std::uint8_t turn);
  void take_over(std::span<const Key> keys, const Shape& shape);
  void take_from(std::uint32_t owner, std::uint32_t stop);
  std::uint32_t own(const Piece& piece, std::span<const Key> keys, const Shape& shape);
  void move_block(std::uint32_t block, std::uint32_t id);
  void end_takes();
  void supersede(std::uint32_t id);
  std::uint32_t adopt();
  void add_leaf(std::uint32_t block);
  void remove_leaf(std::uint32_t block);
  bool is_immune(std::uint32_t block) noexcept;
  bool is_leaving(std::uint32_t id) noexcept;  // a segment: whether its client said so
  void end_immunity();
  Ghost& put_ghost(const Key& key, std::uint32_t id);
  void leave(std::uint32_t id);
  void forget_all();

  Rates rates_;
  BlockTable blocks_;
  GhostTable ghosts_;
  Segments segments_;
  Recency recency_;
  Guard guard_;
  std::vector<std::uint32_t> found_;  // of the keys of a request, the blocks in the tier
  std::unordered_map<std::string, std::vector<Name>> running_;
  std::unordered_map<std::uint64_t, std::uint8_t> sessions_;  // turns, by hash
  std::vector<std::uint64_t> session_ring_;
  std::size_t session_next_ = 0;
  std::vector<Piece> pieces_;
  std::vector<Name> taken_;
  double start_ = -1;
  double now_ = 0;
  std::uint32_t requests_ = 0;
  std::uint32_t learned_at_ = 0;  // of `requests_`
  double learned_now_ = 0;
  std::uint64_t surprises_ = 0;  // that the guard was told of
};

}  // namespace flexkv::eviction
