// SPDX-License-Identifier: Apache-2.0
//
// The memory of an index that other processes may read: a table of hashes, and the key in each slot.
// One process writes it. It has no address, and what a reader meets in the middle of a change is a miss.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "../zeroed_array.hpp"
#include "keys.hpp"

namespace flexkv::index {

using Slot = std::int32_t;
inline constexpr Slot kNoSlot = -1;

// The number of resets of an index.
using Resets = std::uint32_t;

// The time between two resets. Its number begins again after eight of them.
using Epoch = std::uint8_t;
inline constexpr Epoch kEpochs = 8;

inline constexpr Epoch epoch_after(Resets resets) noexcept { return static_cast<Epoch>(resets % kEpochs); }

template <typename T>
T load_word(const T& place) noexcept {
  return __atomic_load_n(&place, __ATOMIC_ACQUIRE);
}

template <typename T>
void store_word(T& place, T value) noexcept {
  __atomic_store_n(&place, value, __ATOMIC_RELEASE);
}

// Everything before it is done, for all processes, before anything after it begins.
inline void fence() noexcept { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

struct alignas(64) Header {
  std::uint64_t magic;
  std::uint32_t layout;
  std::uint32_t slots;
  HashSeed seed;
  Resets resets;
};

// A place of the table: the hash of a key, and in `word` all else. A lookup reads this alone.
struct alignas(16) Entry {
  std::uint64_t hash;
  std::uint64_t word;
};

// The process that writes to a slot, if it is another than the owner of the index.
using Writer = std::uint8_t;
inline constexpr Writer kNoWriter = 0;

// Whom a block counts for: a digest of the tenant's name, or none if it has no name.
using Tenant = std::uint32_t;
inline constexpr Tenant kNoTenant = 0;
inline constexpr Tenant kUnknownTenant = 0xffffffff;  // of a writer that stores for several

// The key of the block in a slot. Its version is even while that block can be leased. The block that it
// builds on, or none, its tenant, the slot's writer, and the resets before the slot was given to it are
// named for a next owner of the memory. A slot with a writer has the tenant that the writer stores for.
// `flexkv.index.ages` keeps `stored`, and further words behind the header.
struct alignas(64) StoredKey {
  std::uint32_t version;
  Slot parent;
  Py_hash_t parent_hash;
  Tenant tenant;
  Resets resets;
  Writer writer;
  std::uint8_t size;
  char bytes[98];
  std::uint32_t stored;

  KeyView view() const noexcept { return {bytes, size}; }
};
static_assert(sizeof(StoredKey) == 128 && offsetof(StoredKey, stored) == 124);

// flexkv.tiers.base.MAX_KEY_BYTES
inline constexpr std::size_t kMostKeyBytes = 96;
static_assert(kMostKeyBytes <= sizeof(StoredKey::bytes));

inline constexpr std::uint64_t kMagic = 0x5845444e49564b46;  // FKVINDEX
inline constexpr std::uint32_t kLayout = 3;
inline constexpr std::size_t kHeaderBytes = 4096;

// The places of the parts for a number of slots. The table is at most half full.
struct Places {
  std::size_t slots;
  std::size_t entries;

  explicit Places(std::size_t count) noexcept
      : slots(count), entries(std::bit_ceil(2 * count + 2)) {}

  std::size_t keys_start() const noexcept { return kHeaderBytes + entries * sizeof(Entry); }
  std::size_t bytes() const noexcept { return keys_start() + slots * sizeof(StoredKey); }
};

// Whether memory of this size is that of an index of this layout.
inline bool is_index(const char* start, std::size_t size) noexcept {
  const auto* const header = reinterpret_cast<const Header*>(start);
  return size >= kHeaderBytes && load_word(header->magic) == kMagic && header->layout == kLayout &&
         size == Places(header->slots).bytes();
}

// The memory as the one process has it that writes it.
class Memory {
 public:
  // In `shared`, which has `Places::bytes` bytes and outlives this; or of this process alone, if that is
  // null. If `begun`, the memory is that of an index whose owner has ended. Throws std::bad_alloc.
  Memory(std::size_t slots, char* shared, bool begun)
      : places_(slots),
        own_(shared == nullptr ? places_.bytes() : 0),
        start_(shared == nullptr ? &own_[0] : shared) {
    if (!begun) {
      begin();
    }
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  const Places& places() const noexcept { return places_; }
  const char* start() const noexcept { return start_; }
  Header& header() noexcept { return *reinterpret_cast<Header*>(start_); }
  Entry* entries() noexcept { return reinterpret_cast<Entry*>(start_ + kHeaderBytes); }
  StoredKey* keys() noexcept { return reinterpret_cast<StoredKey*>(start_ + places_.keys_start()); }

 private:
  void begin() noexcept {
    // Entries are used at random: a first prompt would wait for all of them.
    std::memset(start_, 0, places_.keys_start());
    Header& made = header();
    made.layout = kLayout;
    made.slots = static_cast<std::uint32_t>(places_.slots);
    made.seed = HashSeed::random();
    store_word(made.magic, kMagic);
  }

  Places places_;
  ZeroedArray<char> own_;
  char* start_;
};

// The memory as any process reads it.
class Reading {
 public:
  explicit Reading(const Places& places, const char* start) noexcept
      : header_(reinterpret_cast<const Header*>(start)),
        entries_(reinterpret_cast<const Entry*>(start + kHeaderBytes)),
        keys_(reinterpret_cast<const StoredKey*>(start + places.keys_start())),
        slots_(places.slots),
        mask_(places.entries - 1) {}

  std::size_t slots() const noexcept { return slots_; }
  std::size_t places() const noexcept { return mask_ + 1; }
  Epoch epoch() const noexcept { return epoch_after(load_word(header_->resets)); }
  Py_hash_t hash(KeyView key) const noexcept { return hash_of(key, header_->seed); }
  const StoredKey& key(Slot slot) const noexcept { return keys_[slot]; }
  std::size_t home(Py_hash_t hash) const noexcept { return static_cast<std::size_t>(hash) & mask_; }
  std::size_t after(std::size_t place) const noexcept { return (place + 1) & mask_; }

  // What an entry says.
  struct Said {
    Py_hash_t hash;
    Slot slot;  // none if it is empty
    Epoch epoch;
    bool ready;
    bool is_whole;  // not if it was read in the middle of a change

    bool is_empty() const noexcept { return slot == kNoSlot; }
  };

  Said at(std::size_t place) const noexcept {
    const std::uint64_t word = load_word(entries_[place].word);
    const std::uint64_t hash = load_word(entries_[place].hash);
    return {static_cast<Py_hash_t>(hash),
            static_cast<Slot>(word & kNumberMask) - 1,
            static_cast<Epoch>(word >> kEpochShift & kByte),
            (word >> kReadyShift & kByte) != 0,
            word >> kTagShift == hash >> kTagShift};
  }

  static Entry entry(Py_hash_t hash, Slot slot, Epoch epoch, bool ready) noexcept {
    const auto bits = static_cast<std::uint64_t>(hash);
    return {bits, (bits >> kTagShift << kTagShift) |
                      static_cast<std::uint64_t>(ready) << kReadyShift |
                      static_cast<std::uint64_t>(epoch) << kEpochShift |
                      static_cast<std::uint64_t>(slot + 1)};
  }

  // The first entry of this hash, or an empty one.
  Said first(Py_hash_t hash) const noexcept {
    std::size_t place = home(hash);
    Said said = at(place);
    while (!said.is_empty() && (said.hash != hash || !said.is_whole)) {
      place = after(place);
      said = at(place);
    }
    return said;
  }

  void prefetch(Py_hash_t hash) const noexcept { __builtin_prefetch(&entries_[home(hash)]); }
  void prefetch_key(Slot slot) const noexcept { __builtin_prefetch(&keys_[slot]); }

  // Calls `function` with the place of each key, whether it has a block, and whether that is ready,
  // until it returns false. It compares hashes alone, so it reads one cache line for a key instead of
  // five. Another key has the same hash of 64 bits by chance alone.
  template <typename Function>
  void look_each(const Keys& keys, Function function) const {
    const Epoch now = epoch();
    in_portions(keys, [&](Py_ssize_t start, const Py_hash_t* hashes, Py_ssize_t count) {
      for (Py_ssize_t i = 0; i < count; ++i) {
        const Said said = first(hashes[i]);
        const bool has = !said.is_empty() && said.epoch == now;
        if (!function(start + i, has, has && said.ready)) {
          return false;
        }
      }
      return true;
    });
  }

  // Not tuned: more than the memory accesses that a core has under way at once.
  static constexpr Py_ssize_t kAtOnce = 16;

  // Calls `function` with the place of the first key of each portion, the hashes of its keys, and
  // their number, until it returns false. Fetches the memory of the entries one portion before. Throws
  // PythonError if one is no key.
  template <typename Function>
  void in_portions(const Keys& keys, Function function) const {
    Py_hash_t hashes[2][kAtOnce];
    fetch(keys, 0, hashes[0]);
    for (Py_ssize_t start = 0, turn = 0; start < keys.size(); start += kAtOnce, turn ^= 1) {
      fetch(keys, start + kAtOnce, hashes[turn ^ 1]);
      if (!function(start, hashes[turn], portion(keys, start))) {
        return;
      }
    }
  }

 private:
  static constexpr std::uint64_t kNumberMask = 0xffffffff;
  static constexpr std::uint64_t kByte = 0xff;
  static constexpr int kEpochShift = 32;
  static constexpr int kReadyShift = 40;
  static constexpr int kTagShift = 48;

  static Py_ssize_t portion(const Keys& keys, Py_ssize_t start) noexcept {
    const Py_ssize_t left = keys.size() - start;
    return left < kAtOnce ? left : kAtOnce;
  }

  void fetch(const Keys& keys, Py_ssize_t start, Py_hash_t* hashes) const {
    const Py_ssize_t count = portion(keys, start);
    for (Py_ssize_t i = 0; i < count; ++i) {
      hashes[i] = hash(keys[start + i]);
      prefetch(hashes[i]);
    }
  }

  const Header* header_;
  const Entry* entries_;
  const StoredKey* keys_;
  std::size_t slots_;
  std::size_t mask_;
};

}  // namespace flexkv::index
