// SPDX-License-Identifier: Apache-2.0
//
// Runs of blocks that are judged together, and which of them is worth least to keep.
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "numbers.hpp"
#include "heap.hpp"
#include "rates.hpp"
#include "work.hpp"

namespace flexkv::eviction {

inline constexpr std::uint32_t kMostLength = 0xffff;

// Whether the priority of a request is the usual one. Of segments that are worth the same, those of a
// lower level leave first.
enum Level : std::uint8_t { kUsual, kLower, kHigher };
inline constexpr std::uint32_t kLevels = 3;

// Blocks `start` to `stop` of a request's prompt, which no later request has used. 20 bytes.
struct Segment {
  std::uint32_t born = 0;  // tick when its age began
  std::uint32_t live = kNone;
  std::uint16_t number = 0;  // of its class
  std::uint16_t start = 0;
  std::uint16_t length = 0;
  std::uint16_t prompt = 0;  // blocks of the request's prompt
  std::uint8_t turn = 0;     // of the request
  std::uint8_t generation = 1;
  bool used : 1 = false;
  bool superseded : 1 = false;
  bool unknown : 1 = false;  // no request is known that it came from
  std::uint8_t level : 2 = 0;  // see `Level`

  std::uint32_t stop() const noexcept { return std::uint32_t{start} + length; }

  // Of all its blocks together: a long one weighs less than its blocks alone, since they come back
  // together or not at all.
  float weight() const noexcept { return std::sqrt(static_cast<float>(length)); }
};
static_assert(sizeof(Segment) == 20);

// What only a segment with blocks in the tier needs. 32 bytes.
struct Live {
  std::uint32_t segment = kNone;
  std::uint32_t cached = 0;
  std::uint32_t leaves = kNone;  // one of its blocks that may leave
  std::uint32_t older = kNone;   // neighbours of its age's bin
  std::uint32_t newer = kNone;
  std::uint32_t previous = kNone;  // neighbours of its class, bin and level, of those that had a leaf
  std::uint32_t next = kNone;
  std::uint8_t bin = 0;
  bool listed = false;
};
static_assert(sizeof(Live) == 32);

struct Ends {
  std::uint32_t first = kNone;
  std::uint32_t last = kNone;
};

// All segments, in the order in which they were made: a new one takes the place of the oldest that
// has no block in the tier.
class Segments {
 public:
  // Room for `segments`, of which `live` have blocks in the tier. Throws std::bad_alloc.
  Segments(Rates& rates, std::uint32_t segments, std::uint32_t live);

  Segment& operator[](std::uint32_t id) noexcept { return segments_[id]; }
  Live& live_of(std::uint32_t id) noexcept { return live_[segments_[id].live]; }
  std::uint32_t cached(std::uint32_t id) const noexcept {
    const std::uint32_t live = segments_[id].live;
    return live == kNone ? 0 : live_[live].cached;
  }
  bool can_live() const noexcept { return free_live_ != kNone; }

  // The time from now on; segments come of age.
  void advance(std::uint32_t tick);

  float age(const Segment& segment) const noexcept {
    return static_cast<float>(tick_ - segment.born) * kSecondsOfTick;
  }

  // A segment that is not placed yet, of a new generation.
  std::uint32_t make();

  // Of a segment that is not listed.
  void set_level(std::uint32_t id, Level level) noexcept { segments_[id].level = level; }

  // The segment belongs to this class from now on, and its age begins.
  void place(std::uint32_t id, std::uint16_t number);

  // It has blocks in the tier from now on. Needs `can_live`.
  void enliven(std::uint32_t id);

  // It has none any more, and leaves once its turn comes.
  void bury(std::uint32_t id);

  // It has no blocks any more.
  void free(std::uint32_t id);

  // It has a leaf.
  void open(std::uint32_t id);

  // The segment that is worth least of those that have a leaf, or kNone.
  std::uint32_t lowest();

  float worth(std::uint32_t id) const noexcept {
    const Segment& segment = segments_[id];
    return rates_.worth(segment.number, bin_of(age(segment)));
  }

  // Of a segment, how many were made after it.
  std::uint32_t made_since(std::uint32_t id) const noexcept {
    const auto count = static_cast<std::uint32_t>(segments_.size());
    return id < next_ ? next_ - id : next_ + count - id;
  }

  std::size_t size() const noexcept { return segments_.size(); }

  // The segment that was made last, of those that have blocks in the tier, or kNone.
  std::uint32_t newest() const noexcept;

  // Begins to learn from what was noted and is followed now; `requests` have come since the last time.
  // `learn_on` does a part of that, bounded, if there is any left.
  void learn(std::uint32_t requests);
  void learn_on();
  bool is_learning() const noexcept { return !learning_.done(); }

  // The segment is followed no further; `back` of its weight came back.
  void note(std::uint32_t id, float back);

  void clear();

  std::size_t bytes() const noexcept;

  static constexpr float kTicksOfSecond = 64;

 private:
  static constexpr float kSecondsOfTick = 1 / kTicksOfSecond;

  // Those of the usual level come first: without others, there are no numbers beyond them.
  static constexpr auto kListsOfLevel = static_cast<std::uint32_t>(Rates::kMostClasses * kBins);

  // Whether a list of segments of one class, bin and level is worth less than another.
  struct WorthLess {
    const Rates& rates;
    bool operator()(std::uint32_t one, std::uint32_t other) const noexcept {
      const float a = worth(one);
      const float b = worth(other);
      if (a != b) {
        return a < b;
      }
      const int first = order(one / kListsOfLevel);
      const int second = order(other / kListsOfLevel);
      return first != second ? first < second : one < other;
    }
    static int order(std::uint32_t level) noexcept {
      return level == kLower ? -1 : static_cast<int>(level == kHigher);
    }
    float worth(std::uint32_t list) const noexcept {
      const std::uint32_t place = list % kListsOfLevel;
      return rates.worth(static_cast<std::uint16_t>(place / kBins),
                         static_cast<std::uint8_t>(place % kBins));
    }
  };

  std::uint32_t list_of(std::uint32_t live) const noexcept {
    const Segment& segment = segments_[live_[live].segment];
    return static_cast<std::uint32_t>(segment.level * kListsOfLevel +
                                      rates_.order_of(segment.number) * kBins + live_[live].bin);
  }
  void enter_bin(std::uint32_t live, std::uint8_t bin);
  void leave_bin(std::uint32_t live);
  void enter_list(std::uint32_t live);
  void leave_list(std::uint32_t live);
  // Whether the segment had begun its age when it began to learn, and that age.
  bool was_there(const Segment& segment) const noexcept {
    return static_cast<std::int32_t>(counted_at_ - segment.born) >= 0;
  }
  float age_when_counted(const Segment& segment) const noexcept {
    return static_cast<float>(counted_at_ - segment.born) * kSecondsOfTick;
  }

  void list_again();
  Work learning(std::uint32_t requests);

  Rates& rates_;
  std::vector<Segment> segments_;
  std::vector<Live> live_;
  std::uint32_t free_live_ = kNone;
  std::uint32_t next_ = 0;  // whose turn it is to leave
  std::uint32_t tick_ = 0;
  std::array<Ends, kBins> bins_{};  // oldest first
  std::vector<Ends> lists_;         // by level, class and bin, oldest first
  Heap<WorthLess> ranked_;          // of the lists with segments, and some others
  // Segments before the place were counted for what it learns, with the ages of that tick.
  std::uint32_t counted_ = kNone;
  std::uint32_t counted_at_ = 0;
  Budget budget_;
  Work learning_;
};

}  // namespace flexkv::eviction
