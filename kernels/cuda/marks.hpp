// SPDX-License-Identifier: Apache-2.0
//
// What a stream of the engine had to do at moments of the past.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <utility>

#include "device.hpp"
#include "driver.hpp"
#include "event_pool.hpp"
#include "mover.hpp"

namespace flexkv::cuda {

// An event that a mark and transfers may have in common. It returns to its pool with the last of them,
// which goes, therefore, under the lock of the pool.
using SharedEvent = std::shared_ptr<CUevent_st>;

// An event behind what is in a stream now, which the caller has named as its argument `name`. Throws
// InvalidArgument if it is no stream of the device, DriverError, std::bad_alloc.
inline SharedEvent record_event(const Driver& driver, EventPool& pool, const std::string& name,
                                std::uint64_t stream) {
  check_not_captured(driver, name, stream);
  SharedEvent event(pool.take(), [&pool](CUevent last) { pool.put(last); });
  const CUresult result = driver.cuEventRecord(event.get(), reinterpret_cast<CUstream>(stream));
  check_stream(driver, result, name, stream, "cuEventRecord");
  return event;
}

// The last marks of a mover, numbered from 1. Not thread-safe.
class Marks {
 public:
  // Keeps the event, and forgets the oldest mark if there are more than kMarks.
  std::int64_t add(SharedEvent event) {
    kept_.push_back(std::move(event));
    if (kept_.size() > kMarks) {
      kept_.pop_front();
    }
    return ++newest_;
  }

  // Throws InvalidArgument if there is no such mark, or none any more.
  const SharedEvent& find(std::int64_t mark) const {
    const auto oldest = newest_ - static_cast<std::int64_t>(kept_.size()) + 1;
    if (mark < oldest || mark > newest_) {
      throw InvalidArgument("mark is " + std::to_string(mark) + ", kept are " +
                            (kept_.empty() ? std::string("none")
                                           : std::to_string(oldest) + " to " +
                                                 std::to_string(newest_)));
    }
    return kept_[static_cast<std::size_t>(mark - oldest)];
  }

  void clear() { kept_.clear(); }

 private:
  std::deque<SharedEvent> kept_;
  std::int64_t newest_ = 0;

  static constexpr std::size_t kMarks = FKV_MARKS;
};

}  // namespace flexkv::cuda
