// SPDX-License-Identifier: Apache-2.0
//
// The blocks of a tier by their keys: 24 bytes a block and 6 for finding it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "numbers.hpp"

namespace flexkv::eviction {

// The bytes of a key, and the object that owns them. Equal keys have equal hashes in every process.
struct Key {
  std::string_view bytes;
  void* object = nullptr;
  std::uint64_t hash = 0;

  Key() = default;
  Key(std::string_view view, void* owner)
      : bytes(view), object(owner), hash(std::hash<std::string_view>{}(view) * kMix) {}

  // Halves of the hash that do not depend on one another.
  std::uint32_t high() const noexcept { return static_cast<std::uint32_t>(hash >> 32); }
  std::uint32_t low() const noexcept { return static_cast<std::uint32_t>(hash ^ (hash >> 29)); }

 private:
  static constexpr std::uint64_t kMix = 0x9e3779b97f4a7c15;
};

inline constexpr std::uint32_t kMostForks = 31;

// One block. While it is a leaf, `previous` and `next` are others of its segment, in a ring.
struct Block {
  void* key;
  std::uint32_t digest;
  std::uint32_t segment : 26;
  std::uint32_t forks : 5;  // blocks that were seen behind it, less one
  std::uint32_t leaf : 1;
  std::uint32_t previous;
  std::uint32_t next;
};
static_assert(sizeof(Block) == 24);

// Keys are told apart by all their bytes.
class BlockTable {
 public:
  using BytesOf = std::string_view (*)(void*);

  // `bytes_of` gives the bytes of an object that a key came with. Throws std::bad_alloc.
  BlockTable(std::uint32_t capacity, BytesOf bytes_of);

  // See Hazard::read_keys_by.
  void read_keys_by(BytesOf bytes_of) noexcept { bytes_of_ = bytes_of; }

  Block& operator[](std::uint32_t block) noexcept { return blocks_[block]; }
  std::uint32_t size() const noexcept { return size_; }
  bool full() const noexcept { return free_ == kNone; }

  // The number of the block, or kNone.
  std::uint32_t find(const Key& key) const noexcept;

  // Reads the memory that `find` will need.
  void prefetch(const Key& key) const noexcept { numbers_.prefetch(key.high()); }

  // The same for `remove`: first its record, then its place, which the record tells.
  void prefetch_record(std::uint32_t block) const noexcept { __builtin_prefetch(&blocks_[block]); }
  void prefetch_place(std::uint32_t block) const noexcept {
    numbers_.prefetch(blocks_[block].digest);
  }

  // A new block with this key, which the table does not have. Needs room.
  std::uint32_t add(const Key& key, std::uint32_t segment, std::uint32_t forks) noexcept;

  void remove(std::uint32_t block) noexcept;

  // Calls `drop` with each key's object, and is empty then.
  template <typename Drop>
  void clear(Drop drop) {
    numbers_.clear([&](std::uint32_t block) { drop(blocks_[block].key); });
    free_all();
  }

  std::size_t bytes() const noexcept {
    return blocks_.capacity() * sizeof(Block) + numbers_.bytes();
  }

 private:
  void free_all() noexcept;

  BytesOf bytes_of_;
  std::vector<Block> blocks_;
  NumberTable numbers_;
  std::uint32_t free_ = kNone;
  std::uint32_t size_ = 0;
};

}  // namespace flexkv::eviction
