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

// What comes back is a surprise if it is so many times as much as expected, and so much more.
constexpr double kSurpriseRatio = 4;
constexpr double kSurpriseEvents = 25;

constexpr int kRounds = 3;

// Bins that blocks are taken to be seen in before anything is learned: up to 40 minutes.
constexpr std::size_t kFirstBins = 24;
constexpr std::size_t kLeastBins = 2;

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

void Exposure::spend(std::size_t number, Row& row) const noexcept {
  const Reached& one = rows_[number];
  float beyond = 0;
  for (std::size_t b = kBins; b-- > 0;) {
    row[b] += one.seconds[b] + beyond * kEdges.width[b];
    beyond += one.weight[b];
  }
}

void Exposure::scale(std::size_t number, float share) noexcept {
  Reached& one = rows_[number];
  for (std::size_t b = 0; b < kBins; ++b) {
    one.weight[b] *= share;
    one.seconds[b] *= share;
  }
}

void Exposure::take(std::size_t number, Exposure& other) noexcept {
  Reached& one = rows_[number];
  Reached& taken = other.rows_[number];
  for (std::size_t b = 0; b < kBins; ++b) {
    one.weight[b] += taken.weight[b];
    one.seconds[b] += taken.seconds[b];
  }
  taken = Reached{};
}

Rates::Rates(std::vector<std::vector<float>> priors)
    : priors_(std::move(priors)), model_{priors_, {}, kEdges.prior, kFirstBins} {
  Row ones;
  ones.fill(1);
  for (std::size_t i = 0; i < kShaped; ++i) {
    model_.shapes[i].assign(priors_[i].size(), ones);
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
  for (std::vector<Row>* const rows : {&events_, &late_events_, &worths_}) {
    rows->push_back(Row{});
  }
  for (Exposure* const exposure : {&ended_, &current_, &late_}) {
    exposure->add_class();
  }
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
  const bool is_late = number >= fitted_ && number < fitting_;
  (is_late ? late_ : ended_).add(number, age, weight);
  if (back > 0) {
    (is_late ? late_events_ : events_)[number][bin_of(age)] += back;
  }
}

float Rates::product_of(const Model& model, const Class& one) noexcept {
  float product = 1;
  for (std::size_t i = 0; i < kFactors; ++i) {
    product *= model.levels[i][one.factors[i]];
  }
  return product;
}

// What is to be fitted of one class. What was noted meanwhile counts the next time.
void Rates::gather(std::size_t number, float share) noexcept {
  ended_.scale(number, share);
  Row& events = events_[number];
  for (float& each : events) {
    each *= share;
  }
  Row& row = exposure_[number];
  ended_.spend(number, row);
  current_.spend(number, row);
  current_.clear(number);
  fit_events_[number] = events;
  for (std::size_t b = 0; b < kBins; ++b) {
    events[b] += std::exchange(late_events_[number][b], 0.0F);
  }
  ended_.take(number, late_);
  fitted_ = number + 1;
  for (std::size_t b = kBins; b-- > next_.seen;) {
    if (row[b] > 0) {
      next_.seen = b + 1;
      break;
    }
  }
}

// Of what was gathered, whether more has come back since the last time than the rates of then expect.
bool Rates::is_surprising(std::size_t number, float share) const noexcept {
  const Class& one = classes_[number];
  const double product =
      static_cast<double>(product_of(model_, one)) * static_cast<double>(one.own);
  double events = -static_cast<double>(share * one.events);
  double expected = -static_cast<double>(share * one.expected);
  for (std::size_t b = 0; b < model_.seen; ++b) {
    events += static_cast<double>(fit_events_[number][b]);
    expected += rate_of(one, product, b) * static_cast<double>(exposure_[number][b]);
  }
  return events > kSurpriseRatio * expected + kSurpriseEvents;
}

// Hits per second of a class whose levels have this product.
double Rates::rate_of(const Class& one, double product, std::size_t bin) const noexcept {
  double rate = static_cast<double>(model_.base[bin]) * product;
  for (std::size_t i = 0; i < kShaped; ++i) {
    rate *= static_cast<double>(model_.shapes[i][one.factors[i]][bin]);
  }
  return rate;
}

// Fit the numbers of which rates are products to what came back: the base rates and levels by turns, then
// shapes, then each class's own number.
Work Rates::fit(Budget& budget, std::uint32_t requests) {
  const std::size_t count = fitting_;
  exposure_.assign(count, Row{});
  fit_events_.assign(count, Row{});
  next_ = model_;
  next_.seen = kLeastBins;
  const float share = std::exp(-static_cast<float>(requests) / kMemory);
  for (std::size_t c = 0; c < count; ++c) {
    gather(c, share);
    surprises_ += learned_ && is_surprising(c, share);
    co_await budget.spend(5);
  }
  const std::size_t seen = next_.seen;
  Row events_by_bin{};
  std::vector<float> events(count);
  std::vector<float> expected(count);
  for (std::size_t c = 0; c < count; ++c) {
    for (std::size_t b = 0; b < seen; ++b) {
      events[c] += fit_events_[c][b];
      events_by_bin[b] += fit_events_[c][b];
    }
    co_await budget.spend(1);
  }
  for (int round = 0; round < kRounds; ++round) {
    Row wanted{};
    for (std::size_t c = 0; c < count; ++c) {
      const float product = product_of(next_, classes_[c]);
      for (std::size_t b = 0; b < seen; ++b) {
        wanted[b] += product * exposure_[c][b];
      }
      co_await budget.spend(1);
    }
    fit_base(wanted, events_by_bin);
    for (std::size_t c = 0; c < count; ++c) {
      float sum = 0;
      for (std::size_t b = 0; b < seen; ++b) {
        sum += exposure_[c][b] * next_.base[b];
      }
      expected[c] = sum;
      co_await budget.spend(1);
    }
    fit_levels(expected, events);
    co_await budget.spend(static_cast<int>(count / 2));
  }
  // `exposure_` becomes what was expected to come back.
  for (std::size_t c = 0; c < count; ++c) {
    const float product = product_of(next_, classes_[c]);
    for (std::size_t b = 0; b < seen; ++b) {
      exposure_[c][b] *= next_.base[b] * product;
    }
    co_await budget.spend(1);
  }
  for (std::size_t i = 0; i < kShaped; ++i) {
    std::vector<Row>& shapes = next_.shapes[i];
    std::vector<Row> got(shapes.size());
    std::vector<Row> wanted(shapes.size());
    for (std::size_t c = 0; c < count; ++c) {
      const std::uint8_t level = classes_[c].factors[i];
      for (std::size_t b = 0; b < seen; ++b) {
        got[level][b] += fit_events_[c][b];
        wanted[level][b] += exposure_[c][b];
      }
      co_await budget.spend(1);
    }
    for (std::size_t j = 0; j < shapes.size(); ++j) {
      for (std::size_t b = 0; b < seen; ++b) {
        shapes[j][b] = (got[j][b] + kLevelEvents) / (wanted[j][b] + kLevelEvents);
      }
    }
    for (std::size_t c = 0; c < count; ++c) {
      const Row& shape = shapes[classes_[c].factors[i]];
      for (std::size_t b = 0; b < seen; ++b) {
        exposure_[c][b] *= shape[b];
      }
      co_await budget.spend(1);
    }
  }
  for (std::size_t c = 0; c < count; ++c) {
    float back = 0;
    for (std::size_t b = 0; b < seen; ++b) {
      back += exposure_[c][b];
    }
    Class& one = classes_[c];
    one.own = (events[c] + kClassEvents) / (back + kClassEvents);
    one.events = events[c];
    one.expected = back * one.own;
    co_await budget.spend(1);
  }
  std::swap(model_, next_);
}

void Rates::fit_base(const Row& wanted, const Row& events) noexcept {
  for (std::size_t b = 0; b < next_.seen; ++b) {
    const float pseudo = kBaseWidths * kEdges.width[b];
    next_.base[b] = (events[b] + kEdges.prior[b] * pseudo) / (wanted[b] + pseudo);
  }
}

void Rates::fit_levels(const std::vector<float>& expected, const std::vector<float>& events) {
  std::vector<float> product(expected.size());
  for (std::size_t c = 0; c < product.size(); ++c) {
    product[c] = product_of(next_, classes_[c]);
  }
  for (std::size_t i = 0; i < kFactors; ++i) {
    std::vector<float>& levels = next_.levels[i];
    std::vector<float> got(levels.size());
    std::vector<float> wanted(levels.size());
    for (std::size_t c = 0; c < product.size(); ++c) {
      const std::uint8_t level = classes_[c].factors[i];
      product[c] /= levels[level];
      got[level] += events[c];
      wanted[level] += expected[c] * product[c];
    }
    for (std::size_t j = 0; j < levels.size(); ++j) {
      // What is expected to differ differs from the first level, whatever that turned out to be.
      const float prior = priors_[i][j] == 1 ? 1 : priors_[i][j] * levels[0];
      levels[j] = (got[j] + kLevelEvents * prior) / (wanted[j] + kLevelEvents);
    }
    for (std::size_t c = 0; c < product.size(); ++c) {
      product[c] *= levels[classes_[c].factors[i]];
    }
  }
}

void Rates::stage(std::size_t number) {
  staged_.resize(number + 1);
  value(number, staged_[number]);
}

void Rates::commit() noexcept {
  std::ranges::copy(staged_, worths_.begin());
  staged_ = {};
  learned_ = true;
}

// The worth is the most hits per second that keeping the blocks for some time gives. Not the rate of the
// moment: users pause before they go on.
void Rates::value(std::size_t number, Row& worth) const noexcept {
  const Class& one = classes_[number];
  const double product =
      static_cast<double>(product_of(model_, one)) * static_cast<double>(one.own);
  std::array<double, kBins> rate;
  std::array<double, kBins> left;  // the share that is not back by the end of a bin
  std::array<double, kBins> held;  // seconds that all were held by then
  double hazard = 0;
  double before = 1;
  double seconds = 0;
  for (std::size_t b = 0; b < model_.seen; ++b) {
    rate[b] = std::max(rate_of(one, product, b), kLeastRate);
    hazard += rate[b] * static_cast<double>(kEdges.width[b]);
    left[b] = std::exp(-std::min(hazard, kMostHazard));
    seconds += (before - left[b]) / rate[b];
    held[b] = seconds;
    before = left[b];
  }
  worth.fill(0);
  for (std::size_t b = 0; b < model_.seen; ++b) {
    const double scale = 1 / (b == 0 ? 1 : left[b - 1]);
    const double own_held = (1 - left[b] * scale) / rate[b];
    double best = rate[b];
    for (std::size_t later = b + 1; later < model_.seen; later += kHorizonStep) {
      const double back = 1 - scale * left[later];
      const double kept = own_held + scale * (held[later] - held[b]);
      best = std::max(best, back / kept);
    }
    worth[b] = static_cast<float>(best);
  }
}

std::size_t Rates::bytes() const noexcept {
  std::size_t rows = 0;
  for (const std::vector<Row>* const each :
       {&events_, &late_events_, &fit_events_, &exposure_, &worths_, &staged_}) {
    rows += each->capacity();
  }
  return rows * sizeof(Row) + classes_.capacity() * sizeof(Class) + ended_.bytes() +
         current_.bytes() + late_.bytes();
}

}  // namespace flexkv::eviction
