// SPDX-License-Identifier: Apache-2.0
//
// What an index of a directory keeps of each slot: its key, its checksum, its time and its place in the order
// of use. It is made for millions of slots. Memory that no block has used yet takes no room.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "../zeroed_array.hpp"
#include "keys.hpp"
#include "memory.hpp"

namespace flexkv::index {

inline constexpr std::size_t kChecksumBytes = 16;

enum class SlotState : std::uint8_t { none, writing, ready };

struct SlotRow {
  std::int64_t recorded;  // how many writes had begun when its record was written
  char checksum[kChecksumBytes];
  std::uint32_t resets;  // of the index when the block entered
  std::int32_t uses;     // reads and writes
  // The order of use, as a ring through a row that is no slot's; free slots are a chain by `next`.
  Slot next;
  Slot previous;
  // The block that it builds on, or none, and in which of the policy's indexes. It has left once its
  // slot has another life.
  Slot parent;
  std::uint32_t parent_life;
  std::uint32_t life;
  std::int32_t children;
  std::uint16_t parent_index;
  SlotState state;
  bool known;         // to the policy
  std::uint8_t part;  // of the keys, where its key is

  bool is_held() const noexcept { return children > 0 || uses > 0; }
};
static_assert(sizeof(SlotRow) == 64);

// Room for the key of each slot, and for its length before it.
struct KeyPart {
  std::size_t stride;
  ZeroedArray<char> bytes;

  KeyPart(std::size_t each, std::size_t slots) : stride(each), bytes(each * slots) {}
};

class SlotRows {
 public:
  // Throws std::bad_alloc.
  explicit SlotRows(std::size_t slots)
      : times_(slots),
        size_(slots),
        seed_(HashSeed::random()),
        rows_(slots + 1),
        mask_(std::bit_ceil(slots * 3 / 2 + 1) - 1),
        places_(mask_ + 1) {
    row(ring()).next = row(ring()).previous = ring();
  }
  SlotRows(const SlotRows&) = delete;
  SlotRows& operator=(const SlotRows&) = delete;

  std::size_t size() const noexcept { return size_; }
  bool has(Py_ssize_t slot) const noexcept {
    return slot >= 0 && static_cast<std::size_t>(slot) < size_;
  }
  SlotRow& row(Slot slot) noexcept { return rows_[at(slot)]; }
  const SlotRow& row(Slot slot) const noexcept { return rows_[at(slot)]; }

  // Empty if the slot has no block.
  KeyView key_of(Slot slot) const noexcept {
    if (row(slot).state == SlotState::none) {
      return {};
    }
    const char* const key = key_at(slot);
    return {key + 1, static_cast<std::uint8_t>(*key)};
  }

  // The time of the block in a slot, zero if that has none.
  std::uint32_t time_of(Slot slot) const noexcept { return times_[at(slot)]; }
  // The same, zero if nobody knows it, too.
  std::uint32_t known_time_of(Slot slot) const noexcept {
    return time_of(slot) == kUnknownTime ? 0 : time_of(slot);
  }
  void set_time(Slot slot, std::uint32_t time) noexcept {
    times_[at(slot)] = std::max(time, kUnknownTime);
  }

 protected:
  // The time of a block of which nobody knows it: earlier than all others.
  static constexpr std::uint32_t kUnknownTime = 1;

  static std::size_t at(Slot slot) noexcept { return static_cast<std::size_t>(slot); }
  Slot ring() const noexcept { return static_cast<Slot>(size_); }

  // Stale or not.
  Slot find_any(KeyView key) const noexcept {
    for (std::size_t place = home(key); places_[place] != 0; place = after(place)) {
      if (const Slot slot = slot_at(place); key_of(slot) == key) {
        return slot;
      }
    }
    return kNoSlot;
  }

  // The size and the bytes of the key that a slot has or had last.
  const char* key_at(Slot slot) const noexcept { return start_of(*keys_[row(slot).part], slot); }
  const std::vector<std::shared_ptr<KeyPart>>& keys() const noexcept { return keys_; }

  // Makes room for keys of this size, and returns whether that is a further part. Keys that are there stay
  // where they are: a step waits for this. The keys of one cache have few sizes. Throws std::bad_alloc.
  bool fit(std::size_t size) {
    if (!keys_.empty() && size < keys_.back()->stride) {
      return false;
    }
    keys_.push_back(std::make_shared<KeyPart>(size + 1, size_));
    return true;
  }

  // Gives a key that fits, and that the table lacks, to a slot.
  void put(Slot slot, KeyView key, SlotState state) noexcept {
    row(slot).state = state;
    row(slot).part = 0;
    while (keys_[row(slot).part]->stride <= key.size()) {
      ++row(slot).part;
    }
    char* const start = start_of(*keys_[row(slot).part], slot);
    *start = static_cast<char>(key.size());
    std::copy(key.begin(), key.end(), start + 1);
    std::size_t place = home(key);
    while (places_[place] != 0) {
      place = after(place);
    }
    places_[place] = static_cast<std::uint32_t>(slot) + 1;
  }

  // The slot has no block from now on.
  void take_out(Slot slot) noexcept {
    std::size_t gap = home(key_of(slot));
    while (slot_at(gap) != slot) {
      gap = after(gap);
    }
    for (std::size_t i = after(gap); places_[i] != 0; i = after(i)) {
      // Entries move up to the gap unless that lies before their home.
      if (((i - home(key_of(slot_at(i)))) & mask_) >= ((i - gap) & mask_)) {
        places_[gap] = places_[i];
        gap = i;
      }
    }
    places_[gap] = 0;
    row(slot).state = SlotState::none;
    times_[at(slot)] = 0;
  }

  // Links a slot as used just before `behind`; behind the ring's own row, as used now.
  void link(Slot slot, Slot behind) noexcept {
    const Slot older = row(behind).next;
    row(slot).next = older;
    row(slot).previous = behind;
    row(older).previous = row(behind).next = slot;
  }

  void unlink(Slot slot) noexcept {
    row(row(slot).previous).next = row(slot).next;
    row(row(slot).next).previous = row(slot).previous;
  }

  std::size_t taken() const noexcept { return taken_; }
  bool has_free() const noexcept { return free_ != kNoSlot || fresh_ < size_; }

  // This slot and those behind it were never taken.
  Slot reached() const noexcept { return static_cast<Slot>(fresh_); }

  Slot take_free() noexcept {
    ++taken_;
    if (free_ == kNoSlot) {
      return static_cast<Slot>(fresh_++);
    }
    const Slot slot = free_;
    free_ = row(slot).next;
    return slot;
  }

  void set_free(Slot slot) noexcept {
    --taken_;
    row(slot).next = free_;
    free_ = slot;
  }

  // The slots without a block are free, and all others taken. None behind `last` has one.
  void count_free(Slot last) noexcept {
    taken_ = fresh_ = at(last + 1);
    for (Slot slot = last; slot >= 0; --slot) {
      if (row(slot).state == SlotState::none) {
        set_free(slot);
      }
    }
  }

  ZeroedArray<std::uint32_t> times_;  // by slot

 private:
  // Open addressing with linear probing, at most two thirds full (Knuth, The Art of Computer Programming,
  // volume 3, section 6.4, algorithms L and R).
  std::size_t home(KeyView key) const noexcept {
    return static_cast<std::size_t>(hash_of(key, seed_)) & mask_;
  }
  std::size_t after(std::size_t place) const noexcept { return (place + 1) & mask_; }
  Slot slot_at(std::size_t place) const noexcept { return static_cast<Slot>(places_[place]) - 1; }
  static char* start_of(KeyPart& part, Slot slot) noexcept { return &part.bytes[at(slot) * part.stride]; }

  std::size_t size_;
  HashSeed seed_;
  ZeroedArray<SlotRow> rows_;
  std::size_t mask_;
  ZeroedArray<std::uint32_t> places_;  // slots plus one
  std::vector<std::shared_ptr<KeyPart>> keys_;  // of growing strides
  Slot free_ = kNoSlot;
  std::size_t fresh_ = 0;  // see `reached`
  std::size_t taken_ = 0;
};

}  // namespace flexkv::index
