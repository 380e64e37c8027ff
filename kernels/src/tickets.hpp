// SPDX-License-Identifier: Apache-2.0
//
// Which tickets are pending, done or failed. Not thread-safe; the owner's lock guards it.
#pragma once

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

  void finish(std::int64_t ticket) noexcept { not_done_.erase(ticket); }

  void fail(std::int64_t ticket) noexcept { not_done_.find(ticket)->second = Status::failed; }

  // Everything still pending becomes failed.
  void fail_pending() noexcept {
    for (auto& [ticket, status] : not_done_) {
      status = Status::failed;
    }
  }

  bool issued(std::int64_t ticket) const noexcept { return ticket >= 1 && ticket < next_; }

  Status status(std::int64_t ticket) const noexcept {
    const auto found = not_done_.find(ticket);
    return found == not_done_.end() ? Status::done : found->second;
  }

 private:
  std::int64_t next_ = 1;
  std::unordered_map<std::int64_t, Status> not_done_;
};

}  // namespace flexkv
