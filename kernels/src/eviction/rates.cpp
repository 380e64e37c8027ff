// SPDX-License-Identifier: Apache-2.0
#include "rates.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace flexkv::eviction {

namespace {

constexpr float kFirstSeconds = 4;
constexpr float kBinsPerOctave = 2.5F;

// What rates are before there are events, and how many events outweigh that. Chosen on the first
// half of Mooncake's conversation trace.
constexpr float kBaseRate = 0.15F;
constexpr float kBaseWidths = 2;
constexpr float kLevelEvents = 25;
constexpr float kClassEvents = 70;

// After so many requests, what was learned before counts for a third. Not tuned: it is ten times the
// trace, and far less than after what no float would grow any more.
constexpr float kMemory = 120000;

constexpr int kRounds = 3;

// Bins that blocks are taken to be seen in before anything is learned: up to 40 minutes.
constexpr std::size_t kFirstBins = 24;

// Every second bin is a time that keeping may end.
constexpr std::size_t kHorizonStep = 2;

constexpr double kMostHazard = 500;  // whose exponential is still a number
constexpr double kLeastRate = 1e-12;

struct Edges {
  Row end;
  Row width;
  Row prior;

  Edges() {
    float begin = 0;
    for (std::size_t b = 0; b < kBins; ++b) {
      end[b] = kFirstSeconds * std::exp2(static_cast<float>(b) / kBinsPerOctave);
      width[b] = end[b] - begin;
      prior[b] = kBaseRate / (begin + kFirstSeconds);
      begin = end[b];
    }
    end[kBins - 1] = std::numeric_limits<float>::infinity();
  }
};

const Edges kEdges;

std::uint64_t packed(const Factors& factors) noexcept {
  std::uint64_t all = 0;
  for (const std::uint8_t level : factors) {
    all = (all << 8) | level;
  }
  return all;
}

}  // namespace

std::uint8_t bin_of(float age) noexcept {
  const auto found = std::upper_bound(kEdges.end.begin(), kEdges.end.end() - 1, age);
  return static_cast<std::uint8_t>(found - kEdges.end.begin());
}

float end_of(std::uint8_t bin) noexcept { return kEdges.end[bin]; }

void Exposure::spend(std::span<Row> rows) const {
  for (std::size_t c = 0; c < rows_.size(); ++c) {
    float beyond = 0;
    for (std::size_t b = kBins; b-- > 0;) {
      rows[c][b] += rows_[c].seconds[b] + beyond * kEdges.width[b];
      beyond += rows_[c].weight[b];
    }
  }
}

void Exposure::scale(float share) {
  for (Reached& row : rows_) {
    for (std::size_t b = 0; b < kBins; ++b) {
      row.weight[b] *= share;
      row.seconds[b] *= share;
    }
  }
}

void Exposure::clear() noexcept { std::ranges::fill(rows_, Reached{}); }

Rates::Rates(std::vector<std::vector<float>> priors)
    : priors_(std::move(priors)), levels_(priors_), base_(kEdges.prior), seen_(kFirstBins) {
  Row ones;
  ones.fill(1);
  for (std::size_t i = 0; i < kShaped; ++i) {
    shapes_[i].assign(priors_[i].size(), ones);
  }
}

std::uint16_t Rates::class_of(const Factors& factors) {
  const std::uint64_t name = packed(factors);
  if (const auto known = numbers_.find(name); known != numbers_.end()) {
    return known->second;
  }
  if (classes_.size() == kMostClasses) {
    return 0;
  }
  const auto number = static_cast<std::uint16_t>(classes_.size());
  classes_.push_back({factors});
  events_.push_back(Row{});
  worths_.push_back(Row{});
  ended_.add_class();
  current_.add_class();
  numbers_.emplace(name, number);
  value(number);
  orders_.push_back(learned_ ? number : first_worth_as(number));
  return number;
}

std::uint16_t Rates::first_worth_as(std::uint16_t number) const noexcept {
  std::uint16_t other = 0;
  while (worths_[other] != worths_[number]) {
    ++other;
  }
  return other;
}

void Rates::note(std::uint16_t number, float age, float weight, float back) {
  ended_.add(number, age, weight);
  if (back > 0) {
    events_[number][bin_of(age)] += back;
  }
}

void Rates::learn(std::uint32_t requests) {
  const float share = std::exp(-static_cast<float>(requests) / kMemory);
  ended_.scale(share);
  for (Row& row : events_) {
    for (float& each : row) {
      each *= share;
    }
  }
  exposure_.assign(classes_.size(), Row{});
  ended_.spend(exposure_);
  current_.spend(exposure_);
  current_.clear();
  seen_ = 2;
  for (const Row& row : exposure_) {
    for (std::size_t b = kBins; b-- > seen_;) {
      if (row[b] > 0) {
        seen_ = b + 1;
        break;
      }
    }
  }
  fit();
  for (std::size_t c = 0; c < classes_.size(); ++c) {
    value(c);
  }
  learned_ = true;
}

float Rates::product_of(const Class& one) const noexcept {
  float product = 1;
  for (std::size_t i = 0; i < kFactors; ++i) {
    product *= levels_[i][one.factors[i]];
  }
  return product;
}

// Fit the numbers of which rates are products to what came back.
void Rates::fit() {
  const std::size_t count = classes_.size();
  Row events_by_bin{};
  for (std::size_t c = 0; c < count; ++c) {
    float sum = 0;
    for (std::size_t b = 0; b < seen_; ++b) {
      sum += events_[c][b];
      events_by_bin[b] += events_[c][b];
    }
    classes_[c].events = sum;
  }
  std::vector<float> expected(count);
  for (int round = 0; round < kRounds; ++round) {
    Row wanted{};
    for (std::size_t c = 0; c < count; ++c) {
      const float product = product_of(classes_[c]);
      for (std::size_t b = 0; b < seen_; ++b) {
        wanted[b] += product * exposure_[c][b];
      }
    }
    for (std::size_t b = 0; b < seen_; ++b) {
      const float pseudo = kBaseWidths * kEdges.width[b];
      base_[b] = (events_by_bin[b] + kEdges.prior[b] * pseudo) / (wanted[b] + pseudo);
    }
    for (std::size_t c = 0; c < count; ++c) {
      float sum = 0;
      for (std::size_t b = 0; b < seen_; ++b) {
        sum += exposure_[c][b] * base_[b];
      }
      expected[c] = sum;
    }
    fit_levels(expected);
  }
  fit_shapes();
}

void Rates::fit_levels(const std::vector<float>& expected) {
  std::vector<float> product(classes_.size());
  for (std::size_t c = 0; c < product.size(); ++c) {
    product[c] = product_of(classes_[c]);
  }
  for (std::size_t i = 0; i < kFactors; ++i) {
    std::vector<float>& levels = levels_[i];
    std::vector<float> got(levels.size());
    std::vector<float> wanted(levels.size());
    for (std::size_t c = 0; c < product.size(); ++c) {
      const std::uint8_t level = classes_[c].factors[i];
      product[c] /= levels[level];
      got[level] += classes_[c].events;
      wanted[level] += expected[c] * product[c];
    }
    for (std::size_t j = 0; j < levels.size(); ++j) {
      levels[j] = (got[j] + kLevelEvents * priors_[i][j]) / (wanted[j] + kLevelEvents);
    }
    for (std::size_t c = 0; c < product.size(); ++c) {
      product[c] *= levels[classes_[c].factors[i]];
    }
  }
}

// Shapes, then each class's own number. `exposure_` becomes what was expected to come back.
void Rates::fit_shapes() {
  for (std::size_t c = 0; c < classes_.size(); ++c) {
    const float product = product_of(classes_[c]);
    for (std::size_t b = 0; b < seen_; ++b) {
      exposure_[c][b] *= base_[b] * product;
    }
  }
  for (std::size_t i = 0; i < kShaped; ++i) {
    std::vector<Row>& shapes = shapes_[i];
    std::vector<Row> got(shapes.size());
    std::vector<Row> wanted(shapes.size());
    for (std::size_t c = 0; c < classes_.size(); ++c) {
      const std::uint8_t level = classes_[c].factors[i];
      for (std::size_t b = 0; b < seen_; ++b) {
        got[level][b] += events_[c][b];
        wanted[level][b] += exposure_[c][b];
      }
    }
    for (std::size_t j = 0; j < shapes.size(); ++j) {
      for (std::size_t b = 0; b < seen_; ++b) {
        shapes[j][b] = (got[j][b] + kLevelEvents) / (wanted[j][b] + kLevelEvents);
      }
    }
    for (std::size_t c = 0; c < classes_.size(); ++c) {
      const Row& shape = shapes[classes_[c].factors[i]];
      for (std::size_t b = 0; b < seen_; ++b) {
        exposure_[c][b] *= shape[b];
      }
    }
  }
  for (std::size_t c = 0; c < classes_.size(); ++c) {
    float expected = 0;
    for (std::size_t b = 0; b < seen_; ++b) {
      expected += exposure_[c][b];
    }
    classes_[c].own = (classes_[c].events + kClassEvents) / (expected + kClassEvents);
  }
}

// Work out what blocks of a class are worth: the most hits per second that keeping them for some
// time gives. Not the rate of the moment: users pause before they go on.
void Rates::value(std::size_t number) {
  const Class& one = classes_[number];
  const double product = static_cast<double>(product_of(one)) * static_cast<double>(one.own);
  std::array<double, kBins> rate;
  std::array<double, kBins> left;  // the share that is not back by the end of a bin
  std::array<double, kBins> held;  // seconds that all were held by then
  double hazard = 0;
  double before = 1;
  double seconds = 0;
  for (std::size_t b = 0; b < seen_; ++b) {
    double all = static_cast<double>(base_[b]) * product;
    for (std::size_t i = 0; i < kShaped; ++i) {
      all *= static_cast<double>(shapes_[i][one.factors[i]][b]);
    }
    rate[b] = std::max(all, kLeastRate);
    hazard += rate[b] * static_cast<double>(kEdges.width[b]);
    left[b] = std::exp(-std::min(hazard, kMostHazard));
    seconds += (before - left[b]) / rate[b];
    held[b] = seconds;
    before = left[b];
  }
  Row& worth = worths_[number];
  worth.fill(0);
  for (std::size_t b = 0; b < seen_; ++b) {
    const double own = std::exp(-rate[b] * static_cast<double>(kEdges.width[b]));
    const double own_held = (1 - own) / rate[b];
    const double scale = own / left[b];
    double best = rate[b];
    for (std::size_t later = b + 1; later < seen_; later += kHorizonStep) {
      const double back = 1 - scale * left[later];
      const double kept = own_held + scale * (held[later] - held[b]);
      best = std::max(best, back / kept);
    }
    worth[b] = static_cast<float>(best);
  }
}

std::size_t Rates::bytes() const noexcept {
  return (events_.capacity() + exposure_.capacity() + worths_.capacity()) * sizeof(Row) +
         classes_.capacity() * sizeof(Class) + ended_.bytes() + current_.bytes();
}

}  // namespace flexkv::eviction
