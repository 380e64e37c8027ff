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

// Open addressing with linear probing. A slot has a number and as many bits of its digest as fit beside
// it. The owner of the numbers keeps whole digests.
class NumberTable {
 public:
  // For numbers below `capacity`. Throws std::bad_alloc.
  explicit NumberTable(std::uint32_t capacity)
      : number_bits_(static_cast<std::uint32_t>(std::bit_width(capacity))),
        number_mask_((std::uint32_t{1} << number_bits_) - 1),
        slots_(capacity * kSlotsOfTwo / 2 + 8) {}

  // The first number of this digest for which `is_it` is true, or kNone.
  template <typename IsIt>
  std::uint32_t find(std::uint32_t digest, IsIt is_it) const noexcept {
    const std::uint32_t tag = digest << number_bits_;
    for (std::size_t at = home(digest); slots_[at] != 0; at = after(at)) {
      if ((slots_[at] & ~number_mask_) == tag && is_it(number_of(slots_[at]))) {
        return number_of(slots_[at]);
      }
    }
    return kNone;
  }

  // Reads the memory that `find` will need.
  void prefetch(std::uint32_t digest) const noexcept {
    __builtin_prefetch(slots_.data() + home(digest));
  }

  // The number is not in the table, and the table has fewer than its capacity.
  void add(std::uint32_t digest, std::uint32_t number) noexcept {
    std::size_t at = home(digest);
    while (slots_[at] != 0) {
      at = after(at);
    }
    slots_[at] = tagged(digest, number);
  }

  // `digest_of` gives the digest of a number in the table.
  template <typename DigestOf>
  void remove(std::uint32_t number, DigestOf digest_of) noexcept {
    const std::uint32_t digest = digest_of(number);
    const std::uint32_t slot = tagged(digest, number);
    std::size_t hole = home(digest);
    while (slots_[hole] != slot) {
      hole = after(hole);
    }
    for (std::size_t at = after(hole); slots_[at] != 0; at = after(at)) {
      // It may move back unless its home lies behind the hole.
      const std::size_t first = home(digest_of(number_of(slots_[at])));
      const bool behind = hole < at ? first > hole && first <= at : first > hole || first <= at;
      if (!behind) {
        slots_[hole] = slots_[at];
        hole = at;
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

  std::uint32_t tagged(std::uint32_t digest, std::uint32_t number) const noexcept {
    return (digest << number_bits_) | (number + 1);
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
