// SPDX-License-Identifier: Apache-2.0
//
// The blocks of a tier by their keys. Its size is fixed: no step of an engine waits while it grows.
#pragma once

#include <cstddef>

#include "block.hpp"

namespace flexkv::index {

// Open addressing with linear probing, at most half full.
//
// A reset costs nothing: the entries of earlier epochs are found by `find_any` alone, until they are
// removed. A key has one entry at most.
class BlockTable {
 public:
  // For all blocks of `store`, in the memory of its keys. Both outlive it.
  BlockTable(Memory& memory, BlockStore& store)
      : store_(store), entries_(memory.entries()), reading_(memory.places(), memory.start()) {}
  BlockTable(const BlockTable&) = delete;
  BlockTable& operator=(const BlockTable&) = delete;

  // The table as readers have it.
  const Reading& reading() const noexcept { return reading_; }

  // The block of this key, or null.
  Block* find(KeyView key) const noexcept { return find(key, reading_.hash(key)); }

  Block* find(KeyView key, Py_hash_t hash) const noexcept {
    const Reading::Said said = said_of(key, hash);
    return is_current(said) ? &store_[said.slot] : nullptr;
  }

  // The same, stale or not.
  Block* find_any(KeyView key, Py_hash_t hash) const noexcept {
    const Reading::Said said = said_of(key, hash);
    return said.is_empty() ? nullptr : &store_[said.slot];
  }

  // Calls `function` with the place of each key and its block, or null, until it returns false.
  // The memory of blocks is seldom in the processor's caches: that of several is fetched at once.
  template <typename Function>
  void find_each(const Keys& keys, Function function) const {
    reading_.in_portions(keys, [&](Py_ssize_t start, const Py_hash_t* hashes, Py_ssize_t count) {
      fetch_blocks(hashes, count);
      for (Py_ssize_t i = 0; i < count; ++i) {
        if (!function(start + i, find(keys[start + i], hashes[i]))) {
          return false;
        }
      }
      return true;
    });
  }

  // Readers find nothing from now on.
  void empty() noexcept {
    for (std::size_t place = 0; place < reading_.places(); ++place) {
      put(place, {});
    }
  }

  // Adds a block whose key it does not have; there is room.
  void add(const Block* block) noexcept {
    std::size_t place = reading_.home(block->hash);
    while (!reading_.at(place).is_empty()) {
      place = reading_.after(place);
    }
    put(place, Reading::entry(block->hash, store_.slot_of(block), store_.epoch(), false));
  }

  // A block that it has is ready from now on, until it is removed.
  void set_ready(const Block* block) noexcept {
    const std::size_t place = place_of(block);
    put(place, Reading::entry(block->hash, store_.slot_of(block), reading_.at(place).epoch, true));
  }

  // Removes a block that it has.
  void remove(const Block* block) noexcept {
    std::size_t gap = place_of(block);
    for (std::size_t i = reading_.after(gap); !reading_.at(i).is_empty(); i = reading_.after(i)) {
      // Entries move up to the gap unless that lies before their home.
      if (distance(reading_.home(reading_.at(i).hash), i) >= distance(gap, i)) {
        put(gap, entries_[i]);
        gap = i;
      }
    }
    put(gap, {});
  }

 private:
  bool is_current(const Reading::Said& said) const noexcept {
    return !said.is_empty() && said.epoch == store_.epoch();
  }

  // A reader sees an old entry, the new one, or one whose halves do not fit.
  void put(std::size_t place, const Entry& entry) noexcept {
    store_word(entries_[place].hash, entry.hash);
    store_word(entries_[place].word, entry.word);
  }

  std::size_t distance(std::size_t from, std::size_t to) const noexcept {
    return reading_.home(static_cast<Py_hash_t>(to - from));
  }

  // What the entry of this key says, or an empty one.
  Reading::Said said_of(KeyView key, Py_hash_t hash) const noexcept {
    std::size_t place = reading_.home(hash);
    Reading::Said said = reading_.at(place);
    while (!said.is_empty() && (said.hash != hash || store_.key_of(said.slot) != key)) {
      place = reading_.after(place);
      said = reading_.at(place);
    }
    return said;
  }

  void fetch_blocks(const Py_hash_t* hashes, Py_ssize_t count) const noexcept {
    for (Py_ssize_t i = 0; i < count; ++i) {
      if (const Reading::Said said = reading_.at(reading_.home(hashes[i])); !said.is_empty()) {
        __builtin_prefetch(&store_[said.slot]);
        reading_.prefetch_key(said.slot);
      }
    }
  }

  std::size_t place_of(const Block* block) const noexcept {
    const Slot slot = store_.slot_of(block);
    std::size_t place = reading_.home(block->hash);
    while (reading_.at(place).slot != slot) {
      place = reading_.after(place);
    }
    return place;
  }

  BlockStore& store_;
  Entry* entries_;
  Reading reading_;
};

}  // namespace flexkv::index
