// SPDX-License-Identifier: Apache-2.0
//
// The step that last used each of an engine's blocks. See flexkv.engine.scheduler.access_log, whose rules it keeps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace flexkv::steps {

// Blocks of one request, by their numbers in the engine.
using Table = std::vector<std::uint32_t>;

// All methods that take blocks may throw std::bad_alloc.
class Uses {
 public:
  // More blocks than any engine has; `uses_` would take 1 GiB for them.
  static constexpr std::uint32_t kMostBlocks = 1U << 26;
  static constexpr std::int64_t kEverything = INT64_MAX;

  std::int64_t step() const noexcept { return step_; }
  void begin_step() noexcept { ++step_; }

  // The step uses a block, whichever request has it.
  void touch(std::uint32_t block) { at_least(block, step_); }

  // A request gets a block for the steps from this one on. It may have the block already.
  void hold(std::uint32_t block) {
    reach(block);
    ++uses_[block].holders;
  }

  // A request no longer has these blocks. The step before this one was its last with them.
  void release(const Table& table);

  // The last step that may use the block; kEverything if a request has it.
  std::int64_t last_use(std::uint32_t block) const noexcept;

  void clear() noexcept { uses_.clear(); }

 private:
  struct Use {
    std::int64_t last = 0;
    std::uint32_t holders = 0;  // requests that have the block, by how often each has it
  };

  void reach(std::uint32_t block);
  void at_least(std::uint32_t block, std::int64_t step);

  std::int64_t step_ = 0;
  std::vector<Use> uses_;  // by block
};

}  // namespace flexkv::steps
