// SPDX-License-Identifier: Apache-2.0
//
// Which tickets are pending, done or failed, and how long the last ones took to copy. Not thread-safe; the owner's lock guards it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <unordered_map>

#include "mover.hpp"

namespace flexkv {

// Tickets count up from 1. A ticket that was issued and is neither pending nor failed is done, so
// finished work takes no memory and nobody has to release it.
class Tickets {
 public:
  // Throws std::bad_alloc; then nothing was issued.
  std::int64_t issue_pending() {
    not_done_.emplace(next_, Status::pending);
    return next_++;
  }

  std::int64_t issue_done() noexcept { return next_++; }

  // `copy_ns`: see fkv_mover_copy_ns; 0 if it is not known.
  void finish(std::int64_t ticket, std::int64_t copy_ns) noexcept {
    not_done_.erase(ticket);
    timed_[place(ticket)] = {ticket, copy_ns};
  }

  void fail(std::int64_t ticket) noexcept { not_done_.find(ticket)->second = Status::failed; }

  // Everything still pending becomes failed.
  void fail_pending() noexcept {
    for (auto& [ticket, status] : not_done_) {
      status = Status::failed;
    }
  }

  bool any_pending() const noexcept {
    for (const auto& [ticket, status] : not_done_) {
      if (status == Status::pending) {
        return true;
      }
    }
    return false;
  }

  bool issued(std::int64_t ticket) const noexcept { return ticket >= 1 && ticket < next_; }

  Status status(std::int64_t ticket) const noexcept {
    const auto found = not_done_.find(ticket);
    return found == not_done_.end() ? Status::done : found->second;
  }

  std::int64_t copy_ns(std::int64_t ticket) const noexcept {
    const Timed& timed = timed_[place(ticket)];
    return timed.ticket == ticket ? timed.copy_ns : 0;
  }

 private:
  // Whoever asks does so within a step or two of the engine, in which a few hundred transfers end.
  static constexpr std::size_t kTimed = 4096;

  struct Timed {
    std::int64_t ticket = 0;
    std::int64_t copy_ns = 0;
  };

  static std::size_t place(std::int64_t ticket) noexcept {
    return static_cast<std::size_t>(ticket) % kTimed;
  }

  std::int64_t next_ = 1;
  std::array<Timed, kTimed> timed_;
  std::unordered_map<std::int64_t, Status> not_done_;
};

}  // namespace flexkv
