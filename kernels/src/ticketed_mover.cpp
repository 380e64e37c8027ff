// SPDX-License-Identifier: Apache-2.0
#include "ticketed_mover.hpp"

#include <unistd.h>

#include <string>

namespace flexkv {

TicketedMover::TicketedMover() : pid_(getpid()) {}

bool TicketedMover::orphaned() const { return getpid() != pid_; }

void TicketedMover::require_own_process() const {
  if (orphaned()) {
    throw Closed("the mover belongs to process " + std::to_string(pid_) +
                 ", its threads do not exist in this fork of it");
  }
}

Status TicketedMover::wait(std::int64_t ticket, std::int64_t timeout_us) {
  require_own_process();
  std::unique_lock lock(mutex_);
  await(lock, ticket, timeout_us, [&] { return tickets_.status(ticket) != Status::pending; });
  return tickets_.status(ticket);
}

std::int64_t TicketedMover::copy_ns(std::int64_t ticket) {
  require_own_process();
  const std::lock_guard lock(mutex_);
  require_issued(ticket);
  return tickets_.copy_ns(ticket);
}

void TicketedMover::require_issued(std::int64_t ticket) const {
  if (!tickets_.issued(ticket)) {
    throw InvalidArgument("ticket " + std::to_string(ticket) + " was never given out by this mover");
  }
}

void require_aligned(const std::uint32_t* flag) {
  if (reinterpret_cast<std::uintptr_t>(flag) % alignof(std::uint32_t) != 0) {
    throw InvalidArgument("the flag's address is not a multiple of 4");
  }
}

}  // namespace flexkv
