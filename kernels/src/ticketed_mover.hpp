// SPDX-License-Identifier: Apache-2.0
//
// What movers with threads of their own share: tickets, waiting for them, and the process they
// belong to.
#pragma once

#include <sys/types.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "mover.hpp"
#include "tickets.hpp"

namespace flexkv {

class TicketedMover : public Mover {
 public:
  Status wait(std::int64_t ticket, std::int64_t timeout_us) final;
  std::int64_t copy_ns(std::int64_t ticket) final;
  bool orphaned() const final;

 protected:
  TicketedMover();

  // Throws Closed in a forked child.
  void require_own_process() const;

  // Waits, with the lock, until `ready` or the time has passed. Throws InvalidArgument for a number
  // that was never a ticket.
  template <typename Ready>
  void await(std::unique_lock<std::mutex>& lock, std::int64_t ticket, std::int64_t timeout_us,
             const Ready& ready) {
    require_issued(ticket);
    if (timeout_us > 0) {
      finished_.wait_for(lock, std::chrono::microseconds(std::min(timeout_us, kMaxWaitUs)), ready);
    }
  }

  std::mutex mutex_;  // guards what follows
  std::condition_variable finished_;  // something that `await` may wait for has happened
  Tickets tickets_;

 private:
  // Waits are capped here (about 11 days) because the clock's sum with a larger one would overflow.
  static constexpr std::int64_t kMaxWaitUs = 1'000'000'000'000;

  void require_issued(std::int64_t ticket) const;

  const pid_t pid_;
};

// Throws InvalidArgument for a flag that cannot be written at once.
void require_aligned(const std::uint32_t* flag);

}  // namespace flexkv
