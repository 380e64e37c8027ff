// SPDX-License-Identifier: Apache-2.0
//
// The bulk copies and barriers of one warp, as late or as early as the PTX ISA allows: a read may wait
// until somebody waits for its barrier, a write until somebody waits for its group. So a wait that is
// missing, or for the wrong phase, leaves wrong bytes or hangs, and both are noticed.
#pragma once

#include <cuda.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <random>
#include <vector>

#include "kernel_names.hpp"
#include "warp.hpp"

namespace fake {

// The shared memory of a block: `bytes` were given to the launch. Addresses count from 0 for the
// dynamic part; barriers have addresses far behind it.
class BulkEngine {
 public:
  static constexpr std::uint32_t kBarriers = 1u << 30;

  BulkEngine(Warp& warp, std::vector<char>& shared, std::minstd_rand& random)
      : warp_(warp), shared_(shared), random_(random) {}

  // What bulk_copy.hpp asks of its Ops.
  const std::uint32_t staging = 0;
  const std::uint32_t barriers = kBarriers;

  void sync_warp() { warp_.sync(); }
  void fence_barriers() {}
  void barrier_init(std::uint32_t barrier) { barriers_[barrier] = {}; }

  void barrier_expect(std::uint32_t barrier, std::uint32_t bytes) {
    Barrier& found = barrier_at(barrier);
    found.expected += bytes;
    found.arrived = true;
    complete(found);
  }

  void barrier_wait(std::uint32_t barrier, std::uint32_t parity) {
    Barrier& found = barrier_at(barrier);
    warp_.wait([&] {
      while (!found.reads.empty()) {
        finish_read(found);
      }
      return found.phase % 2 != parity;  // the phase of that parity has ended
    });
  }

  void bulk_read(std::uint32_t to, std::uint64_t source, std::uint32_t bytes,
                 std::uint32_t barrier) {
    check(to, source, bytes);
    Barrier& found = barrier_at(barrier);
    found.reads.push_back({to, source, bytes});
    if (random_() % 2 == 0) {
      finish_read(found);
    }
  }

  void bulk_write(std::uint64_t destination, std::uint32_t from, std::uint32_t bytes) {
    check(from, destination, bytes);
    groups_[warp_.lane()].open.push_back({from, destination, bytes});
  }

  void bulk_commit() {
    Groups& groups = groups_[warp_.lane()];
    groups.committed.push_back(std::move(groups.open));
    groups.open.clear();
  }

  template <std::uint32_t Pending>
  void bulk_wait_read() {
    finish_writes(Pending);
  }

  void bulk_wait_written() { finish_writes(0); }

  CUresult error() const { return error_; }

 private:
  struct Copy {
    std::uint32_t shared;
    std::uint64_t global;
    std::uint32_t bytes;
  };
  struct Barrier {
    std::uint64_t phase = 0;
    std::int64_t expected = 0;  // bytes still to come
    bool arrived = false;
    std::deque<Copy> reads;
  };
  struct Groups {
    std::vector<Copy> open;
    std::deque<std::vector<Copy>> committed;
  };

  Barrier& barrier_at(std::uint32_t address) {
    const auto found = barriers_.find(address);
    if (found != barriers_.end()) {
      return found->second;
    }
    error_ = CUDA_ERROR_ILLEGAL_ADDRESS;  // it was never initialised
    return barriers_[address];
  }

  void complete(Barrier& barrier) {
    if (barrier.arrived && barrier.expected == 0) {
      barrier.phase += 1;
      barrier.arrived = false;
    }
  }

  void finish_read(Barrier& barrier) {
    const Copy copy = barrier.reads.front();
    barrier.reads.pop_front();
    if (error_ == CUDA_SUCCESS) {
      std::memcpy(shared_.data() + copy.shared, reinterpret_cast<const void*>(copy.global),
                  copy.bytes);
    }
    barrier.expected -= copy.bytes;
    complete(barrier);
  }

  void finish_writes(std::size_t pending) {
    std::deque<std::vector<Copy>>& committed = groups_[warp_.lane()].committed;
    for (; committed.size() > pending; committed.pop_front()) {
      for (const Copy& copy : committed.front()) {
        if (error_ == CUDA_SUCCESS) {
          std::memcpy(reinterpret_cast<void*>(copy.global), shared_.data() + copy.shared,
                      copy.bytes);
        }
      }
    }
  }

  // A device faults on shared memory that it was not given, and on what is no multiple of 16.
  void check(std::uint32_t shared, std::uint64_t global, std::uint32_t bytes) {
    if (std::uint64_t{shared} + bytes > shared_.size()) {
      error_ = CUDA_ERROR_ILLEGAL_ADDRESS;
    }
    if (((global | shared | bytes) & 15) != 0) {
      error_ = CUDA_ERROR_MISALIGNED_ADDRESS;
    }
  }

  Warp& warp_;
  std::vector<char>& shared_;
  std::minstd_rand& random_;
  std::map<std::uint32_t, Barrier> barriers_;
  std::array<Groups, Warp::kLanes> groups_;
  CUresult error_ = CUDA_SUCCESS;
};

}  // namespace fake
