// SPDX-License-Identifier: Apache-2.0
//
// Finds numbers of blocks by digests of their keys, in six bytes a number.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace flexkv::eviction {

inline constexpr std::uint32_t kNone = ~std::uint32_t{0};

// `value` of 2^32, scaled to 0 .. size - 1.
inline std::size_t scaled(std::uint32_t value, std::size_t size) noexcept {
  return static_cast<std::size_t>((static_cast<std::uint64_t>(value) * size) >> 32);
}

// Open addressing with linear probing. A slot has a number, its distance from the place where a search
// begins, and as many bits of its digest as fit beside them. The owner of the numbers keeps whole
// digests, which lie at random places in memory: a distance tells what can be told without them.
class NumberTable {
 public:
  // For numbers below `capacity`, at most 2^24. Throws std::bad_alloc.
  explicit NumberTable(std::uint32_t capacity)
      : number_bits_(static_cast<std::uint32_t>(std::bit_width(capacity))),
        number_mask_((std::uint32_t{1} << number_bits_) - 1),
        slots_(capacity * kSlotsOfTwo / 2 + 8) {}

  // The first number of this digest for which `is_it` is true, or kNone.
  template <typename IsIt>
  std::uint32_t find(std::uint32_t digest, IsIt is_it) const noexcept {
    std::uint32_t distance = 0;
    for (std::size_t at = home(digest); slots_[at] != 0; at = after(at), ++distance) {
      if ((slots_[at] & ~number_mask_) == tag(digest, distance) && is_it(number_of(slots_[at]))) {
        return number_of(slots_[at]);
      }
    }
    return kNone;
  }

  // Reads the memory that `find` and `remove` will need first.
  void prefetch(std::uint32_t digest) const noexcept {
    __builtin_prefetch(slots_.data() + home(digest));
  }

  // The number is not in the table, and the table has fewer than its capacity.
  void add(std::uint32_t digest, std::uint32_t number) noexcept {
    std::uint32_t distance = 0;
    std::size_t at = home(digest);
    for (; slots_[at] != 0; at = after(at)) {
      ++distance;
    }
    slots_[at] = tag(digest, distance) | (number + 1);
  }

  // `digest_of` gives the digest of a number in the table.
  template <typename DigestOf>
  void remove(std::uint32_t number, DigestOf digest_of) noexcept {
    std::size_t hole = home(digest_of(number));
    while (slots_[hole] == 0 || number_of(slots_[hole]) != number) {
      hole = after(hole);
    }
    std::uint32_t gap = 1;  // from the hole to `at`
    for (std::size_t at = after(hole); slots_[at] != 0; at = after(at), ++gap) {
      // It may move back unless its home lies behind the hole.
      if (const std::uint32_t distance = distance_of(at, digest_of); distance >= gap) {
        slots_[hole] = moved_to(distance - gap, slots_[at]);
        hole = at;
        gap = 0;
      }
    }
    slots_[hole] = 0;
  }

  // Calls `drop` with each number, and is empty then.
  template <typename Drop>
  void clear(Drop drop) {
    for (std::uint32_t& slot : slots_) {
      if (slot != 0) {
        drop(number_of(slot));
        slot = 0;
      }
    }
  }

  std::size_t bytes() const noexcept { return slots_.capacity() * sizeof(std::uint32_t); }

 private:
  // Slots for each two numbers. At a load of two thirds a digest that is not there takes five probes,
  // which read the slots alone.
  static constexpr std::size_t kSlotsOfTwo = 3;

  // Distances that a slot tells; of longer ones it has the last of these. Not tuned: at a load of two
  // thirds one number of some fifty lies further away.
  static constexpr std::uint32_t kDistanceBits = 4;
  static constexpr std::uint32_t kFar = (1U << kDistanceBits) - 1;

  std::uint32_t tag(std::uint32_t digest, std::uint32_t distance) const noexcept {
    return (digest << kDistanceBits | std::min(distance, kFar)) << number_bits_;
  }
  std::uint32_t moved_to(std::uint32_t distance, std::uint32_t slot) const noexcept {
    return (slot & ~(kFar << number_bits_)) | std::min(distance, kFar) << number_bits_;
  }
  template <typename DigestOf>
  std::uint32_t distance_of(std::size_t at, DigestOf digest_of) const noexcept {
    const std::uint32_t told = slots_[at] >> number_bits_ & kFar;
    if (told < kFar) {
      return told;
    }
    const std::size_t first = home(digest_of(number_of(slots_[at])));
    return static_cast<std::uint32_t>(at >= first ? at - first : at + slots_.size() - first);
  }
  std::uint32_t number_of(std::uint32_t slot) const noexcept { return (slot & number_mask_) - 1; }
  std::size_t home(std::uint32_t digest) const noexcept { return scaled(digest, slots_.size()); }
  std::size_t after(std::size_t slot) const noexcept {
    return slot + 1 == slots_.size() ? 0 : slot + 1;
  }

  std::uint32_t number_bits_;
  std::uint32_t number_mask_;
  std::vector<std::uint32_t> slots_;  // 0 where none is; else low bits of the digest, and number + 1
};

}  // namespace flexkv::eviction
