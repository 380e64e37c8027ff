// SPDX-License-Identifier: Apache-2.0
//
// Which tickets are pending, done or failed. Not thread-safe; the owner's lock guards it.
#pragma once

#include <cstdint>
#include <unordered_set>

#include "mover.hpp"

namespace flexkv {

// Tickets count up from 1. A ticket that was issued and is neither pending nor failed is done, so
// finished work takes no memory and nobody has to release it.
class Tickets {
 public:
  // Throws std::bad_alloc; then nothing was issued.
  std::int64_t issue_pending() {
    pending_.insert(next_);
    return next_++;
  }

  std::int64_t issue_done() noexcept { return next_++; }

  void finish(std::int64_t ticket) noexcept { pending_.erase(ticket); }

  // Everything still pending becomes failed. Called when no more tickets will be issued as pending,
  // so only the first call finds any.
  void fail_pending() noexcept {
    if (!pending_.empty()) {
      failed_.swap(pending_);
    }
  }

  bool issued(std::int64_t ticket) const noexcept { return ticket >= 1 && ticket < next_; }

  Status status(std::int64_t ticket) const noexcept {
    if (pending_.contains(ticket)) {
      return Status::pending;
    }
    return failed_.contains(ticket) ? Status::failed : Status::done;
  }

 private:
  std::int64_t next_ = 1;
  std::unordered_set<std::int64_t> pending_;
  std::unordered_set<std::int64_t> failed_;
};

}  // namespace flexkv
