// SPDX-License-Identifier: Apache-2.0
#include "segments.hpp"

#include <algorithm>

namespace flexkv::eviction {

namespace {

// Segments that one which enters a list late is put before, at most: it is nearly as old as these.
constexpr int kMostSteps = 8;

// Segments that come of age in one call, at most, and units of learning: about 0.1 ms each. After a pause
// the others follow in the next calls.
constexpr int kMostAged = 1024;
constexpr int kSlice = 4000;

// Costs of one class, and of so many segments.
constexpr int kValueUnits = 20;
constexpr std::uint32_t kSegmentsOfUnit = 4;

}  // namespace

Segments::Segments(Rates& rates, std::uint32_t segments, std::uint32_t live)
    : rates_(rates), segments_(segments), live_(live), ranked_(WorthLess{rates}) {
  clear();
}

void Segments::clear() {
  for (Segment& segment : segments_) {
    const std::uint8_t generation = segment.generation;
    segment = Segment{};
    segment.generation = generation == 0xff ? 1 : static_cast<std::uint8_t>(generation + 1);
  }
  free_live_ = kNone;
  for (std::size_t i = live_.size(); i-- > 0;) {
    live_[i] = Live{};
    live_[i].next = free_live_;
    free_live_ = static_cast<std::uint32_t>(i);
  }
  next_ = 0;
  bins_.fill(Ends{});
  std::ranges::fill(lists_, Ends{});
  ranked_.clear();
  learning_ = Work();
  counted_ = kNone;
}

void Segments::advance(std::uint32_t tick) {
  tick_ = tick;
  int left = kMostAged;
  for (std::uint8_t bin = kBins - 1; bin-- > 0;) {
    while (bins_[bin].first != kNone) {
      const std::uint32_t live = bins_[bin].first;
      const float old = age(segments_[live_[live].segment]);
      if (old < end_of(bin)) {
        break;
      }
      if (left-- == 0) {
        return;
      }
      const bool listed = live_[live].listed;
      if (listed) {
        leave_list(live);
      }
      leave_bin(live);
      enter_bin(live, bin_of(old));
      if (listed) {
        enter_list(live);
      }
    }
  }
}

std::uint32_t Segments::make() {
  while (segments_[next_].live != kNone) {
    next_ = next_ + 1 == segments_.size() ? 0 : next_ + 1;
  }
  const std::uint32_t id = next_;
  next_ = next_ + 1 == segments_.size() ? 0 : next_ + 1;
  if (segments_[id].used) {
    note(id, 0);
    free(id);
  }
  segments_[id].used = true;
  return id;
}

void Segments::place(std::uint32_t id, std::uint16_t number) {
  Segment& segment = segments_[id];
  const std::uint32_t live = segment.live;
  if (live != kNone) {
    if (live_[live].listed) {
      leave_list(live);
    }
    leave_bin(live);
  }
  segment.number = number;
  segment.born = tick_;
  if (live != kNone) {
    enter_bin(live, 0);
    if (live_[live].leaves != kNone) {
      enter_list(live);
    }
  }
}

void Segments::enliven(std::uint32_t id) {
  const std::uint32_t live = free_live_;
  free_live_ = live_[live].next;
  live_[live] = Live{};
  live_[live].segment = id;
  segments_[id].live = live;
  enter_bin(live, bin_of(age(segments_[id])));
}

void Segments::bury(std::uint32_t id) {
  const std::uint32_t live = segments_[id].live;
  if (live_[live].listed) {
    leave_list(live);
  }
  leave_bin(live);
  segments_[id].live = kNone;
  live_[live].next = free_live_;
  free_live_ = live;
}

void Segments::free(std::uint32_t id) {
  if (segments_[id].live != kNone) {
    bury(id);
  }
  const std::uint8_t generation = segments_[id].generation;
  segments_[id] = Segment{};
  segments_[id].generation = generation == 0xff ? 1 : static_cast<std::uint8_t>(generation + 1);
}

void Segments::open(std::uint32_t id) {
  const std::uint32_t live = segments_[id].live;
  if (!live_[live].listed) {
    enter_list(live);
  }
}

std::uint32_t Segments::lowest() {
  while (!ranked_.empty()) {
    const std::uint32_t list = ranked_.top();
    while (lists_[list].first != kNone) {
      const std::uint32_t live = lists_[list].first;
      if (live_[live].leaves != kNone) {
        return live_[live].segment;
      }
      leave_list(live);
    }
    ranked_.pop();
  }
  return kNone;
}

std::uint32_t Segments::newest() const noexcept {
  for (const Ends& bin : bins_) {
    if (bin.last != kNone) {
      return live_[bin.last].segment;
    }
  }
  return kNone;
}

void Segments::note(std::uint32_t id, float back) {
  const Segment& segment = segments_[id];
  if (id >= counted_ && counted_ != kNone && was_there(segment)) {
    rates_.current().add(segment.number, age_when_counted(segment), segment.weight());
  }
  rates_.note(segment.number, age(segment), segment.weight(), back);
}

void Segments::learn(std::uint32_t requests) { learning_ = learning(requests); }

void Segments::learn_on() {
  if (!learning_.done()) {
    budget_.grant(kSlice);
    learning_.resume();
  }
}

// Learns from what was when it began, however long it takes.
Work Segments::learning(std::uint32_t requests) {
  rates_.freeze();
  counted_at_ = tick_;
  for (counted_ = 0; counted_ < segments_.size(); ++counted_) {
    if (counted_ % kSegmentsOfUnit == 0) {
      co_await budget_.spend(1);
    }
    const Segment& segment = segments_[counted_];
    if (segment.used && was_there(segment)) {
      rates_.current().add(segment.number, age_when_counted(segment), segment.weight());
    }
  }
  counted_ = kNone;
  Work fit = rates_.fit(budget_, requests);
  for (fit.resume(); !fit.done(); fit.resume()) {
    co_await std::suspend_always();
  }
  const bool first = !rates_.learned();
  for (std::size_t number = 0; number < rates_.classes(); ++number) {
    if (first) {
      rates_.stage(number);
    } else {
      rates_.value(number);
      for (std::uint32_t level = 0; level < kLevels; ++level) {
        const auto first_list = static_cast<std::uint32_t>(level * kListsOfLevel + number * kBins);
        for (std::uint32_t list = first_list; list < first_list + kBins; ++list) {
          if (ranked_.has(list)) {
            ranked_.move(list);
          }
        }
      }
    }
    co_await budget_.spend(kValueUnits);
  }
  if (first) {
    rates_.commit();
    list_again();
  }
}

// Each class has lists of its own from now on.
void Segments::list_again() {
  std::ranges::fill(lists_, Ends{});
  ranked_.clear();
  for (const Ends& bin : bins_) {
    for (std::uint32_t live = bin.first; live != kNone; live = live_[live].newer) {
      if (live_[live].listed) {
        enter_list(live);
      }
    }
  }
}

void Segments::enter_bin(std::uint32_t live, std::uint8_t bin) {
  Ends& ends = bins_[bin];
  const std::uint32_t born = segments_[live_[live].segment].born;
  std::uint32_t older = ends.last;
  for (int i = 0; i < kMostSteps && older != kNone; ++i) {
    if (static_cast<std::int32_t>(segments_[live_[older].segment].born - born) <= 0) {
      break;
    }
    older = live_[older].older;
  }
  const std::uint32_t newer = older == kNone ? ends.first : live_[older].newer;
  live_[live].bin = bin;
  live_[live].older = older;
  live_[live].newer = newer;
  (older == kNone ? ends.first : live_[older].newer) = live;
  (newer == kNone ? ends.last : live_[newer].older) = live;
}

void Segments::leave_bin(std::uint32_t live) {
  const Live& one = live_[live];
  Ends& ends = bins_[one.bin];
  (one.older == kNone ? ends.first : live_[one.older].newer) = one.newer;
  (one.newer == kNone ? ends.last : live_[one.newer].older) = one.older;
}

void Segments::enter_list(std::uint32_t live) {
  const std::uint32_t list = list_of(live);
  if (list >= lists_.size()) {
    lists_.resize(list / kListsOfLevel * kListsOfLevel + rates_.classes() * kBins);
  }
  Ends& ends = lists_[list];
  const std::uint32_t born = segments_[live_[live].segment].born;
  std::uint32_t before = ends.last;
  for (int i = 0; i < kMostSteps && before != kNone; ++i) {
    if (static_cast<std::int32_t>(segments_[live_[before].segment].born - born) <= 0) {
      break;
    }
    before = live_[before].previous;
  }
  const std::uint32_t behind = before == kNone ? ends.first : live_[before].next;
  live_[live].listed = true;
  live_[live].previous = before;
  live_[live].next = behind;
  (before == kNone ? ends.first : live_[before].next) = live;
  (behind == kNone ? ends.last : live_[behind].previous) = live;
  if (!ranked_.has(list)) {
    ranked_.push(list);
  }
}

void Segments::leave_list(std::uint32_t live) {
  Live& one = live_[live];
  Ends& ends = lists_[list_of(live)];
  (one.previous == kNone ? ends.first : live_[one.previous].next) = one.next;
  (one.next == kNone ? ends.last : live_[one.next].previous) = one.previous;
  one.listed = false;
}

std::size_t Segments::bytes() const noexcept {
  return segments_.capacity() * sizeof(Segment) + live_.capacity() * sizeof(Live);
}

}  // namespace flexkv::eviction
