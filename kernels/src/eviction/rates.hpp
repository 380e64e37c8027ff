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

#include "work.hpp"

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

  // Of one class: adds its seconds by bin to `row`; multiplies it by `share`; moves what `other` has of it
  // here.
  void spend(std::size_t number, Row& row) const noexcept;
  void scale(std::size_t number, float share) noexcept;
  void take(std::size_t number, Exposure& other) noexcept;
  void clear(std::size_t number) noexcept { rows_[number] = Reached{}; }

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
  // `priors` are what is expected of each factor's levels in comparison to the first, before anything
  // came back.
  explicit Rates(std::vector<std::vector<float>> priors);

  static constexpr std::size_t kMostClasses = 4096;

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

  // Of how many classes more has come back than the rates before had led to expect, by far. Counted
  // each time that rates are learned.
  std::uint64_t surprises() const noexcept { return surprises_; }

  // What keeping a block of this class is worth at an age of that bin: hits per second of keeping.
  float worth(std::uint16_t number, std::uint8_t bin) const noexcept { return worths_[number][bin]; }

  // Blocks of `weight` are followed no further at an age in seconds; `back` of it came back.
  void note(std::uint16_t number, float age, float weight, float back);

  // From now on `fit` looks at nothing that is noted, until it has looked at what was noted before.
  void freeze() noexcept { fitted_ = 0, fitting_ = classes_.size(); }

  // What was followed still when it was frozen. Emptied by `fit`.
  Exposure& current() noexcept { return current_; }

  // Fits rates to what was noted and what is followed still; `requests` have come since the last time.
  // New classes are worth what these rates say at once; `value` has others follow.
  Work fit(Budget& budget, std::uint32_t requests);

  // Work out what blocks of a class are worth by the last rates.
  void value(std::size_t number) noexcept { value(number, worths_[number]); }

  // The same for the first time that rates were learned: of all classes at once, from `commit` on.
  void stage(std::size_t number);
  void commit() noexcept;

  std::size_t bytes() const noexcept;

 private:
  // Shapes over ages are learned for so many factors, the first.
  static constexpr std::size_t kShaped = 4;

  struct Class {
    Factors factors;
    float own = 1;
    // When rates were last learned: what had come back, and what these rates expect of the same.
    float events = 0;
    float expected = 0;
  };

  // What rates are products of, but for the classes' own numbers.
  struct Model {
    std::vector<std::vector<float>> levels;
    std::array<std::vector<Row>, kShaped> shapes;
    Row base;
    std::size_t seen;  // bins that blocks were seen in
  };

  void gather(std::size_t number, float share) noexcept;
  bool is_surprising(std::size_t number, float share) const noexcept;
  void fit_base(const Row& wanted, const Row& events) noexcept;
  void fit_levels(const std::vector<float>& expected, const std::vector<float>& events);
  void value(std::size_t number, Row& worth) const noexcept;
  std::uint16_t first_worth_as(std::uint16_t number) const noexcept;
  static float product_of(const Model& model, const Class& one) noexcept;
  double rate_of(const Class& one, double product, std::size_t bin) const noexcept;

  std::vector<std::vector<float>> priors_;
  Model model_;
  Model next_;  // while it is fitted
  std::vector<Class> classes_;
  std::vector<Row> worths_;
  std::vector<Row> staged_;
  std::vector<std::uint16_t> orders_;  // see `order_of`
  bool learned_ = false;
  std::uint64_t surprises_ = 0;
  std::vector<Row> events_;
  Exposure ended_;
  Exposure current_;
  // What is noted while it learns, of the classes that `fit` has yet to look at.
  std::vector<Row> late_events_;
  Exposure late_;
  std::size_t fitted_ = 0;
  std::size_t fitting_ = 0;
  // Of the classes that it learns from.
  std::vector<Row> fit_events_;
  std::vector<Row> exposure_;
  std::unordered_map<std::uint64_t, std::uint16_t> numbers_;
};

}  // namespace flexkv::eviction
