// SPDX-License-Identifier: Apache-2.0
#include "lru_model.hpp"

namespace flexkv::eviction {

LruModel::LruModel(std::uint32_t capacity)
    : records_(capacity), numbers_(capacity), most_(capacity) {
  clear();
}

void LruModel::clear() noexcept {
  numbers_.clear([](std::uint32_t) {});
  free_ = kNone;
  for (std::size_t i = records_.size(); i-- > 0;) {
    records_[i].older = free_ & kEnd;
    free_ = static_cast<std::uint32_t>(i);
  }
  first_ = last_ = edge_ = kNone;
  near_ = size_ = 0;
}

void LruModel::set_most(std::uint32_t most) noexcept {
  most_ = most;
  while (size_ > most) {
    lose(last_);
  }
}

void LruModel::set_near(std::uint32_t most) noexcept {
  most_near_ = most;
  while (near_ > most) {
    mark(edge_, false);
    edge_ = number_of(records_[edge_].newer);
  }
  while (near_ < most) {
    const std::uint32_t next = edge_ == kNone ? first_ : number_of(records_[edge_].older);
    if (next == kNone) {
      break;
    }
    mark(next, true);
    edge_ = next;
  }
}

void LruModel::use(std::uint32_t number) noexcept {
  if (number != first_) {
    leave(number);
    enter(kNone, number, first_);
  }
}

void LruModel::add(const Key& key, std::uint32_t before) noexcept {
  if (size_ >= most_) {
    if (most_ == 0) {
      return;
    }
    if (before == last_ && before != kNone) {
      return;  // it would leave at once
    }
    lose(last_);
  }
  const std::uint32_t number = free_;
  Record& made = records_[number];
  free_ = number_of(made.older);
  made.high = key.high();
  made.low = key.low();
  made.near = 0;
  ++size_;
  numbers_.add(made.low, number);
  enter(before, number, before == kNone ? first_ : number_of(records_[before].older));
}

void LruModel::lose(std::uint32_t number) noexcept {
  if (const std::uint32_t next = number_of(records_[number].newer); next != kNone) {
    // The next that leaves, mostly, and the one after it.
    numbers_.prefetch(records_[next].low);
    if (const std::uint32_t second = number_of(records_[next].newer); second != kNone) {
      __builtin_prefetch(&records_[second]);
    }
  }
  leave(number);
  numbers_.remove(number, [&](std::uint32_t each) { return records_[each].low; });
  records_[number].older = free_ & kEnd;
  free_ = number;
  --size_;
}

void LruModel::mark(std::uint32_t number, bool near) noexcept {
  records_[number].near = near;
  near_ += near ? 1 : ~std::uint32_t{0};
}

void LruModel::join(std::uint32_t newer, std::uint32_t older) noexcept {
  if (newer == kNone) {
    first_ = older;
  } else {
    records_[newer].older = older & kEnd;
  }
  if (older == kNone) {
    last_ = newer;
  } else {
    records_[older].newer = newer & kEnd;
  }
}

// Between two neighbours. The near ones stay the first ones.
void LruModel::enter(std::uint32_t newer, std::uint32_t number, std::uint32_t older) noexcept {
  join(newer, number);
  join(number, older);
  const bool is_within = newer == kNone || (records_[newer].near && newer != edge_);
  if (is_within) {
    mark(number, true);
    if (edge_ == kNone) {
      edge_ = number;
    }
  }
  set_near(most_near_);
}

void LruModel::leave(std::uint32_t number) noexcept {
  if (records_[number].near) {
    mark(number, false);
    if (edge_ == number) {
      edge_ = number_of(records_[number].newer);
    }
  }
  join(number_of(records_[number].newer), number_of(records_[number].older));
}

}  // namespace flexkv::eviction
