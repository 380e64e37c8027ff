// SPDX-License-Identifier: Apache-2.0
//
// The lanes of a warp as coroutines of one thread: each runs until it waits, in an order that changes.
// A lane that waits for what never happens is noticed.
#pragma once

#include <ucontext.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>

#include "tiles.hpp"

namespace fake {

class Warp {
 public:
  static constexpr std::uint32_t kLanes = flexkv::cuda::kWarpThreads;

  // `lane` is to run once for each number below kLanes; it must live until all have ended.
  void begin(const std::function<void(std::uint32_t)>& lane) {
    lane_ = &lane;
    for (std::uint32_t i = 0; i < kLanes; ++i) {
      getcontext(&lanes_[i].context);
      lanes_[i].context.uc_stack.ss_sp = lanes_[i].stack.get();
      lanes_[i].context.uc_stack.ss_size = kStackBytes;
      lanes_[i].context.uc_link = &scheduler_;
      lanes_[i].ended = false;
      makecontext(&lanes_[i].context, &Warp::enter, 0);
    }
    ended_ = arrived_ = 0;
  }

  bool ended() const { return ended_ == kLanes; }

  // Lets each lane run until it waits. False if all that are left wait for ever.
  bool turn(std::minstd_rand& random) {
    running_ = this;
    progress_ = false;
    const std::uint32_t shift = static_cast<std::uint32_t>(random());
    for (std::uint32_t i = 0; i < kLanes; ++i) {
      current_ = (i * 5 + shift) % kLanes;  // 5 has no divisor with 32: each lane once
      if (!lanes_[current_].ended) {
        swapcontext(&scheduler_, &lanes_[current_].context);
      }
    }
    return progress_;
  }

  // Of the lane that runs.
  std::uint32_t lane() const { return current_; }

  // Lets other lanes run until `happened`.
  template <typename Condition>
  void wait(const Condition& happened) {
    while (!happened()) {
      swapcontext(&lanes_[current_].context, &scheduler_);
    }
    progress_ = true;
  }

  // Until all lanes have come here.
  void sync() {
    const std::uint64_t number = syncs_;
    arrived_ += 1;
    progress_ = true;
    if (arrived_ == kLanes) {
      arrived_ = 0;
      syncs_ += 1;
    }
    wait([&] { return syncs_ != number; });
  }

 private:
  static constexpr std::size_t kStackBytes = 64 * 1024;

  struct Lane {
    ucontext_t context;
    std::unique_ptr<char[]> stack{new char[kStackBytes]};
    bool ended = false;
  };

  static void enter() {
    Warp& warp = *running_;
    const std::uint32_t number = warp.current_;
    (*warp.lane_)(number);
    warp.lanes_[number].ended = true;
    warp.ended_ += 1;
    warp.progress_ = true;
  }

  static inline thread_local Warp* running_ = nullptr;

  const std::function<void(std::uint32_t)>* lane_ = nullptr;
  ucontext_t scheduler_;
  std::array<Lane, kLanes> lanes_;
  std::uint32_t current_ = 0;
  std::uint32_t ended_ = 0;
  std::uint32_t arrived_ = 0;
  std::uint64_t syncs_ = 0;
  bool progress_ = false;
};

}  // namespace fake
