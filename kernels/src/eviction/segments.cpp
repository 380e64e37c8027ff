// SPDX-License-Identifier: Apache-2.0
#include "segments.hpp"

#include <algorithm>

namespace flexkv::eviction {

namespace {

// Segments that one which enters a list late is put before, at most: it is nearly as old as these.
constexpr int kMostSteps = 8;

}  // namespace

Segments::Segments(Rates& rates, std::uint32_t segments, std::uint32_t live)
    : rates_(rates), segments_(segments), live_(live) {
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
  ranked_.assign(ranked_.size(), false);
  heap_.clear();
}

void Segments::advance(std::uint32_t tick) {
  tick_ = tick;
  for (std::uint8_t bin = kBins - 1; bin-- > 0;) {
    while (bins_[bin].first != kNone) {
      const std::uint32_t live = bins_[bin].first;
      const float old = age(segments_[live_[live].segment]);
      if (old < end_of(bin)) {
        break;
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
    rates_.note(segments_[id].number, age(segments_[id]), segments_[id].weight(), 0);
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
  while (!heap_.empty()) {
    const std::uint32_t list = heap_.front().list;
    while (lists_[list].first != kNone) {
      const std::uint32_t live = lists_[list].first;
      if (live_[live].leaves != kNone) {
        return live_[live].segment;
      }
      leave_list(live);
    }
    std::pop_heap(heap_.begin(), heap_.end());
    heap_.pop_back();
    ranked_[list] = false;
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

void Segments::learn(std::uint32_t requests) {
  Exposure& current = rates_.current();
  for (const Segment& segment : segments_) {
    if (segment.used) {
      current.add(segment.number, age(segment), segment.weight());
    }
  }
  const bool first = !rates_.learned();
  rates_.learn(requests);
  if (first) {
    list_again();
    return;
  }
  for (Ranked& each : heap_) {
    each.worth = rates_.worth(static_cast<std::uint16_t>(each.list / kBins),
                              static_cast<std::uint8_t>(each.list % kBins));
  }
  std::make_heap(heap_.begin(), heap_.end());
}

// Each class has lists of its own from now on.
void Segments::list_again() {
  std::ranges::fill(lists_, Ends{});
  ranked_.assign(ranked_.size(), false);
  heap_.clear();
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
  const std::uint32_t list = list_of(segments_[live_[live].segment].number, live_[live].bin);
  if (list >= lists_.size()) {
    lists_.resize(rates_.classes() * kBins);
    ranked_.resize(lists_.size());
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
  rank(list);
}

void Segments::leave_list(std::uint32_t live) {
  Live& one = live_[live];
  Ends& ends = lists_[list_of(segments_[one.segment].number, one.bin)];
  (one.previous == kNone ? ends.first : live_[one.previous].next) = one.next;
  (one.next == kNone ? ends.last : live_[one.next].previous) = one.previous;
  one.listed = false;
}

void Segments::rank(std::uint32_t list) {
  if (ranked_[list]) {
    return;
  }
  ranked_[list] = true;
  heap_.push_back({rates_.worth(static_cast<std::uint16_t>(list / kBins),
                                static_cast<std::uint8_t>(list % kBins)),
                   list});
  std::push_heap(heap_.begin(), heap_.end());
}

std::size_t Segments::bytes() const noexcept {
  return segments_.capacity() * sizeof(Segment) + live_.capacity() * sizeof(Live);
}

}  // namespace flexkv::eviction
