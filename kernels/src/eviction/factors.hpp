// SPDX-License-Identifier: Apache-2.0
//
// What tells classes of blocks apart: kind, answer, turn, length, new blocks, children, part, hint.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "segments.hpp"

namespace flexkv::eviction {

// Kinds of segments: the body of a turn 0, 1, or later; a trunk that up to 3, up to 15, or more
// prompts leave; what was superseded.
inline constexpr std::uint8_t kBody = 0, kTrunk = 3, kSuperseded = 6;
inline constexpr std::size_t kKinds = 7, kOutputs = 5, kTurns = 6, kLengths = 12, kNews = 8;
inline constexpr std::size_t kChildren = 12, kParts = 3;
inline constexpr std::uint8_t kWhole = 0, kOld = 1, kFresh = 2;

// What a request that runs is taken to answer: up to 256 tokens.
inline constexpr std::uint8_t kUsualOutput = 3;

// Where the hint is among the factors.
inline constexpr std::size_t kHint = 7;

// What levels of hints are expected to do. Hints are believed until they prove wrong.
inline constexpr float kHintPriors[] = {1, 3, 0.1F, 1.5F};

inline std::uint8_t log2_level(std::uint32_t count) {
  return static_cast<std::uint8_t>(
      std::min<std::uint32_t>(static_cast<std::uint32_t>(std::bit_width(count)) - 1, kLengths - 1));
}

inline std::uint8_t turn_level(std::uint8_t turn) {
  return static_cast<std::uint8_t>(turn < 3 ? turn : 3 + (turn >= 5) + (turn >= 9));
}

inline std::uint8_t output_level(std::uint32_t tokens) {
  return static_cast<std::uint8_t>((tokens >= 4) + (tokens >= 16) + (tokens >= 64) + (tokens >= 256));
}

inline std::uint16_t clipped(std::uint32_t count) {
  return static_cast<std::uint16_t>(std::min(count, kMostLength));
}

}  // namespace flexkv::eviction
