// SPDX-License-Identifier: Apache-2.0
//
// How soon blocks come back, learned while they are served.
//
// Blocks are told apart by classes, which are points in a grid of factors. A factor is a property of
// the request that a block came from, such as the turn of its conversation. The rate of returns of a
// class at an age is a product: a base rate of the age, a number for each of the factors' levels, a
// shape over ages for each level of the first factors, and a number for the class itself. A class
// that was seen for the first time therefore has a sensible rate at once, and one that was seen
// often its own.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

namespace flexkv::eviction {

// Ages up to 4 s are the first bin, then there are 2.5 an octave; the last begins after a day.
inline constexpr std::size_t kBins = 38;
inline constexpr std::size_t kFactors = 8;

using Factors = std::array<std::uint8_t, kFactors>;
using Row = std::array<float, kBins>;

// The bin that an age in seconds is in.
std::uint8_t bin_of(float age) noexcept;

// Where a bin ends, in seconds; of the last bin, infinity.
float end_of(std::uint8_t bin) noexcept;

// Weights that were followed, and how far, by class and bin.
class Exposure {
 public:
  // Blocks of `weight` were followed from age 0 to `age` seconds.
  void add(std::size_t number, float age, float weight) {
    const std::uint8_t bin = bin_of(age);
    Reached& row = rows_[number];
    row.weight[bin] += weight;
    row.seconds[bin] += weight * (age - begin(bin));
  }

  void add_class() { rows_.emplace_back(); }

  // Adds the seconds by bin to `rows`, one for each class.
  void spend(std::span<Row> rows) const;

  void scale(float share);
  void clear() noexcept;
  std::size_t bytes() const noexcept { return rows_.capacity() * sizeof(Reached); }

 private:
  struct Reached {
    Row weight{};   // whose last bin this is
    Row seconds{};  // that it was in this bin
  };

  static float begin(std::uint8_t bin) noexcept { return bin == 0 ? 0.0F : end_of(bin - 1); }

  std::vector<Reached> rows_;
};

class Rates {
 public:
  // `priors` are what is expected of each factor's levels in comparison to one another, before
  // anything came back.
  explicit Rates(std::vector<std::vector<float>> priors);

  std::size_t classes() const noexcept { return classes_.size(); }

  // The number of the class with these levels. Once there are kMostClasses, unknown ones share the
  // first. Throws std::bad_alloc.
  std::uint16_t class_of(const Factors& factors);

  const Factors& factors_of(std::uint16_t number) const noexcept {
    return classes_[number].factors;
  }

  // The class in whose order the blocks of this one leave: before anything is learned, the first of
  // those that are worth the same, so that the block used longest ago leaves as with LRU.
  std::uint16_t order_of(std::uint16_t number) const noexcept {
    return learned_ ? number : orders_[number];
  }

  bool learned() const noexcept { return learned_; }

  // What keeping a block of this class is worth at an age of that bin: hits per second of keeping.
  float worth(std::uint16_t number, std::uint8_t bin) const noexcept { return worths_[number][bin]; }

  // Blocks of `weight` are followed no further at an age in seconds; `back` of it came back.
  void note(std::uint16_t number, float age, float weight, float back);

  // What is followed still. Emptied by `learn`.
  Exposure& current() noexcept { return current_; }

  // Learn from what was noted and what is followed still; `requests` have come since the last time.
  void learn(std::uint32_t requests);

  std::size_t bytes() const noexcept;

 private:
  // Shapes over ages are learned for so many factors, the first.
  static constexpr std::size_t kShaped = 4;
  static constexpr std::size_t kMostClasses = 4096;

  struct Class {
    Factors factors;
    float own = 1;
    float events = 0;
  };

  void fit();
  void fit_levels(const std::vector<float>& by_class);
  void fit_shapes();
  void value(std::size_t number);
  std::uint16_t first_worth_as(std::uint16_t number) const noexcept;
  float product_of(const Class& one) const noexcept;

  std::vector<std::vector<float>> priors_;
  std::vector<std::vector<float>> levels_;
  std::array<std::vector<Row>, kShaped> shapes_;
  Row base_;
  std::vector<Class> classes_;
  std::vector<Row> events_;
  std::vector<Row> exposure_;  // while it learns
  std::vector<Row> worths_;
  std::vector<std::uint16_t> orders_;  // see `order_of`
  bool learned_ = false;
  Exposure ended_;
  Exposure current_;
  std::unordered_map<std::uint64_t, std::uint16_t> numbers_;
  std::size_t seen_;  // bins that blocks were seen in
};

}  // namespace flexkv::eviction
