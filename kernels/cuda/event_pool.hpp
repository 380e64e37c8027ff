// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "driver.hpp"

namespace flexkv::cuda {

// Only two events with timing have a time between them; streams follow those without sooner.
inline CUevent create_event(const Driver& driver, bool timing = false) {
  CUevent event = nullptr;
  driver.check(
      driver.cuEventCreate(&event, timing ? CU_EVENT_DEFAULT : CU_EVENT_DISABLE_TIMING),
      "cuEventCreate");
  return event;
}

// Events that are used again and again. Owns all it ever gave out. Not thread-safe. A device must be
// current.
class EventPool {
 public:
  explicit EventPool(const Driver& driver, bool timing = false)
      : driver_(driver), timing_(timing) {}
  EventPool(const EventPool&) = delete;
  EventPool& operator=(const EventPool&) = delete;

  ~EventPool() {
    for (CUevent event : all_) {
      driver_.cuEventDestroy(event);
    }
  }

  // Throws DriverError, std::bad_alloc.
  CUevent take() {
    if (free_.empty()) {
      all_.reserve(all_.size() + 1);
      free_.reserve(all_.size() + 1);  // so that put cannot fail
      all_.push_back(create_event(driver_, timing_));
      return all_.back();
    }
    CUevent event = free_.back();
    free_.pop_back();
    return event;
  }

  void put(CUevent event) noexcept { free_.push_back(event); }

 private:
  const Driver& driver_;
  const bool timing_;
  std::vector<CUevent> all_;
  std::vector<CUevent> free_;
};

}  // namespace flexkv::cuda
