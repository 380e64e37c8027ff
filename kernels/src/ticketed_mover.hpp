// SPDX-License-Identifier: Apache-2.0
//
// What movers with threads of their own share: tickets, waiting for them, and the process they
// belong to.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "mover.hpp"
#include "tickets.hpp"

namespace flexkv {

class TicketedMover : public Mover {
 public:
  Status wait(std::int64_t ticket, std::int64_t timeout_us) final;
  bool orphaned() const final;

 protected:
  TicketedMover();

  // Throws Closed in a forked child.
  void require_own_process() const;

  std::mutex mutex_;  // guards what follows
  std::condition_variable finished_;
  Tickets tickets_;

 private:
  const pid_t pid_;
};

// Throws InvalidArgument for a flag that cannot be written at once.
void require_aligned(const std::uint32_t* flag);

}  // namespace flexkv
