// SPDX-License-Identifier: Apache-2.0
//
// The blocks of a tier by their keys. Its size is fixed: no step of an engine waits while it grows.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "block.hpp"

namespace flexkv::index {

// Open addressing with linear probing, at most half full.
//
// A reset costs nothing: the entries of earlier epochs are found by `find_any` alone, until they are
// removed. A key has one entry at most.
class BlockTable {
 public:
  // For all blocks of `store`, which outlives it. Throws std::bad_alloc.
  explicit BlockTable(BlockStore& store)
      : store_(store), entries_(std::bit_ceil(2 * store.size() + 2)), mask_(entries_.size() - 1) {
    entries_.fault_in();  // entries are used at random: a first prompt would wait for all of it
  }
  BlockTable(const BlockTable&) = delete;
  BlockTable& operator=(const BlockTable&) = delete;

  // The block of this key, or null.
  Block* find(KeyView key) const noexcept { return find(key, hash_of(key)); }

  Block* find(KeyView key, Py_hash_t hash) const noexcept {
    const Entry& entry = entry_of(key, hash);
    return is_current(entry) ? block_of(entry) : nullptr;
  }

  // The same, stale or not.
  Block* find_any(KeyView key, Py_hash_t hash) const noexcept {
    const Entry& entry = entry_of(key, hash);
    return entry.is_empty() ? nullptr : block_of(entry);
  }

  // Calls `function` with the place of each key and its block, or null, until it returns false.
  // The memory of blocks is seldom in the processor's caches: that of several is fetched at once.
  template <typename Function>
  void find_each(const Keys& keys, Function function) const {
    in_portions(keys, [&](Py_ssize_t start, const Hashes& hashes, Py_ssize_t count) {
      fetch_blocks(hashes, count);
      for (Py_ssize_t i = 0; i < count; ++i) {
        if (!function(start + i, find(keys[start + i], hashes[static_cast<std::size_t>(i)]))) {
          return false;
        }
      }
      return true;
    });
  }

  // Calls `function` with the place of each key, whether it has a block, and whether that is ready,
  // until it returns false. It compares hashes alone, so it reads one cache line for a key instead of
  // five. Another key has the same hash of 64 bits by chance alone; `find` compares keys.
  template <typename Function>
  void look_each(const Keys& keys, Function function) const {
    in_portions(keys, [&](Py_ssize_t start, const Hashes& hashes, Py_ssize_t count) {
      for (Py_ssize_t i = 0; i < count; ++i) {
        const Entry& entry = entry_of(hashes[static_cast<std::size_t>(i)]);
        const bool has = is_current(entry);
        if (!function(start + i, has, has && entry.ready)) {
          return false;
        }
      }
      return true;
    });
  }

  // Fetches the memory that a call reads first for the key of this hash.
  void prefetch(Py_hash_t hash) const noexcept { __builtin_prefetch(&entries_[home(hash)]); }

  // Adds a block whose key it does not have; there is room.
  void add(const Block* block) noexcept {
    std::size_t i = home(block->hash);
    while (!entries_[i].is_empty()) {
      i = (i + 1) & mask_;
    }
    entries_[i] = {block->hash, store_.slot_of(block) + 1, store_.epoch(), false};
  }

  // A block that it has is ready from now on, until it is removed.
  void set_ready(const Block* block) noexcept { entries_[place_of(block)].ready = true; }

  // Removes a block that it has.
  void remove(const Block* block) noexcept {
    std::size_t gap = place_of(block);
    for (std::size_t i = (gap + 1) & mask_; !entries_[i].is_empty(); i = (i + 1) & mask_) {
      // Entries move up to the gap unless that lies before their home.
      if (((i - home(entries_[i].hash)) & mask_) >= ((i - gap) & mask_)) {
        entries_[gap] = entries_[i];
        gap = i;
      }
    }
    entries_[gap] = {};
  }

  // Not tuned: more than the memory accesses that a core has under way at once.
  static constexpr Py_ssize_t kAtOnce = 16;

 private:
  // A lookup reads an entry alone, and neither the block nor its key.
  struct Entry {
    Py_hash_t hash = 0;
    Slot number = 0;  // of the slot, from one on; zero if it is empty
    Epoch epoch = 0;
    bool ready = false;

    bool is_empty() const noexcept { return number == 0; }
  };
  static_assert(sizeof(Entry) == 16);

  Block* block_of(const Entry& entry) const noexcept { return &store_[entry.number - 1]; }
  bool is_current(const Entry& entry) const noexcept {
    return !entry.is_empty() && entry.epoch == store_.epoch();
  }

  // The entry of this key, or an empty one.
  const Entry& entry_of(KeyView key, Py_hash_t hash) const noexcept {
    std::size_t i = home(hash);
    while (!entries_[i].is_empty() &&
           (entries_[i].hash != hash || store_.key_of(entries_[i].number - 1) != key)) {
      i = (i + 1) & mask_;
    }
    return entries_[i];
  }
  using Hashes = std::array<Py_hash_t, kAtOnce>;

  // Calls `function` with the place of the first key of each portion, the hashes of its keys, and
  // their number, until it returns false. Fetches the memory of the entries one portion before.
  template <typename Function>
  void in_portions(const Keys& keys, Function function) const {
    const auto count_from = [&](Py_ssize_t start) { return std::min(kAtOnce, keys.size() - start); };
    Hashes hashes = hashes_of(keys, 0, count_from(0));
    for (Py_ssize_t start = 0; start < keys.size(); start += kAtOnce) {
      const Py_ssize_t next = start + kAtOnce;
      Hashes further;
      if (next < keys.size()) {
        further = hashes_of(keys, next, count_from(next));
      }
      if (!function(start, hashes, count_from(start))) {
        return;
      }
      hashes = further;
    }
  }

  // The hashes of some keys, whose entries are fetched. Throws PythonError if one is no key.
  Hashes hashes_of(const Keys& keys, Py_ssize_t start, Py_ssize_t count) const {
    Hashes hashes;
    for (Py_ssize_t i = 0; i < count; ++i) {
      Py_hash_t& hash = hashes[static_cast<std::size_t>(i)];
      hash = hash_of(keys[start + i]);
      __builtin_prefetch(&entries_[home(hash)]);
    }
    return hashes;
  }

  void fetch_blocks(const Hashes& hashes, Py_ssize_t count) const noexcept {
    for (Py_ssize_t i = 0; i < count; ++i) {
      if (const Entry& entry = entries_[home(hashes[static_cast<std::size_t>(i)])];
          !entry.is_empty()) {
        __builtin_prefetch(block_of(entry));
        __builtin_prefetch(&store_.stored_key(entry.number - 1));
      }
    }
  }

  // The first entry of this hash, or an empty one.
  const Entry& entry_of(Py_hash_t hash) const noexcept {
    std::size_t i = home(hash);
    while (!entries_[i].is_empty() && entries_[i].hash != hash) {
      i = (i + 1) & mask_;
    }
    return entries_[i];
  }

  std::size_t place_of(const Block* block) const noexcept {
    const Slot number = store_.slot_of(block) + 1;
    std::size_t i = home(block->hash);
    while (entries_[i].number != number) {
      i = (i + 1) & mask_;
    }
    return i;
  }

  std::size_t home(Py_hash_t hash) const noexcept { return static_cast<std::size_t>(hash) & mask_; }

  BlockStore& store_;
  ZeroedArray<Entry> entries_;
  std::size_t mask_;
};

}  // namespace flexkv::index
