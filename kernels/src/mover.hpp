// SPDX-License-Identifier: Apache-2.0
//
// What the C ABI needs of a mover, whatever device its pages are on.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

#include "flexkv/mover.h"

namespace flexkv {

// A refused argument; what() is the message for the user.
class InvalidArgument : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// A call on a mover that is closed or no longer works.
class Closed : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

enum class Direction { load, store };

enum class Status : std::uint32_t { pending = FKV_PENDING, done = FKV_DONE, failed = FKV_FAILED };

// One batch of block copies; see fkv_mover_submit. The arrays are borrowed for the call.
struct Batch {
  Direction direction;
  const std::uint64_t* blocks;
  const std::uint64_t* offsets;
  std::uint64_t n;
  std::uint32_t first_plane;
  std::uint32_t n_planes;
  std::uint64_t after;
  std::int64_t mark;
  std::uint32_t* flag;
};

class Mover {
 public:
  Mover() = default;
  Mover(const Mover&) = delete;
  Mover& operator=(const Mover&) = delete;
  virtual ~Mover() = default;

  virtual std::uint64_t block_bytes() const = 0;
  // Returns the ticket. Throws InvalidArgument, Closed or std::bad_alloc.
  virtual std::int64_t submit(const Batch& batch) = 0;
  // See fkv_mover_mark. Throws InvalidArgument, Closed or std::bad_alloc.
  virtual std::int64_t mark(std::uint64_t stream) = 0;
  // Throws InvalidArgument for a number that was never a ticket, Closed in a forked child.
  virtual Status wait(std::int64_t ticket, std::int64_t timeout_us) = 0;
  // See fkv_mover_copy_ns; throws as wait does.
  virtual std::int64_t copy_ns(std::int64_t ticket) = 0;
  // Makes a stream follow a transfer, see fkv_mover_hold: nothing once it does, else the state. Throws
  // InvalidArgument for a number that was never a ticket or a stream, Closed.
  virtual std::optional<Status> hold(std::int64_t ticket, std::uint64_t stream,
                                     std::int64_t timeout_us) = 0;
  virtual void close() = 0;
  // Why a transfer failed that was not stopped by close(), of the last one; empty if none did. Throws
  // Closed in a forked child.
  virtual std::string error() = 0;
  // See fkv_mover_path_bytes.
  virtual std::array<std::uint64_t, 5> path_bytes() const { return {}; }
  // Whether this process is a fork of the one that made the mover, so that its threads are not here.
  virtual bool orphaned() const = 0;
};

}  // namespace flexkv
