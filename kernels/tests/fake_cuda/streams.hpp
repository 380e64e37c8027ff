// SPDX-License-Identifier: Apache-2.0
//
// Streams and events of the fake driver: each stream is a thread that runs its operations in order,
// after delays that let any two streams overtake one another.
#pragma once

#include <cuda.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <utility>

namespace fake {

// One lock and one condition for all of the fake: it is not built for speed. Never destroyed: threads
// of streams may outlive main.
inline std::mutex& mutex = *new std::mutex;
inline std::condition_variable& changed = *new std::condition_variable;
inline std::uint32_t max_delay_us = 0;
inline CUresult sticky = CUDA_SUCCESS;  // the error of the context, once one has happened

struct Event {
  bool timing = false;
  std::chrono::steady_clock::time_point time;  // of what was reached
  std::uint64_t recorded = 0;
  std::uint64_t reached = 0;
};

class Stream {
 public:
  explicit Stream(int priority = 0) : priority_(priority), thread_([this] { run(); }) {}

  ~Stream() {
    {
      const std::lock_guard lock(mutex);
      stopped_ = true;
    }
    changed.notify_all();
    thread_.join();
  }

  // With the lock held. The operation runs without it, and returns the error it causes.
  void enqueue(std::function<CUresult()> operation) {
    operations_.push_back(std::move(operation));
    changed.notify_all();
  }

  // An event may be destroyed before the stream comes to it.
  void record(const std::shared_ptr<Event>& event) {
    event->recorded += 1;
    enqueue([event, number = event->recorded] {
      const std::lock_guard lock(mutex);
      event->reached = number;
      event->time = std::chrono::steady_clock::now();
      changed.notify_all();
      return CUDA_SUCCESS;
    });
  }

  void wait_for(const std::shared_ptr<Event>& event) {
    enqueue([this, event, number = event->recorded] {
      std::unique_lock lock(mutex);
      changed.wait(lock, [&] { return stopped_ || sticky || event->reached >= number; });
      return CUDA_SUCCESS;
    });
  }

  int priority() const { return priority_; }

  bool stopped() const {
    const std::lock_guard lock(mutex);
    return stopped_;
  }

  // Whether everything has run. With the lock held.
  bool idle() const { return operations_.empty() && !running_; }

 private:
  void run() {
    std::minstd_rand random(static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(this) >> 4));
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [&] { return stopped_ || (!operations_.empty() && !sticky); });
      if (stopped_) {
        return;
      }
      auto operation = std::move(operations_.front());
      operations_.pop_front();
      running_ = true;
      const auto delay = std::chrono::microseconds(max_delay_us == 0 ? 0 : random() % max_delay_us);
      lock.unlock();
      if (delay.count() != 0) {
        std::this_thread::sleep_for(delay);
      }
      const CUresult result = operation();
      lock.lock();
      running_ = false;
      if (result != CUDA_SUCCESS) {
        sticky = result;
      }
      changed.notify_all();
    }
  }

  const int priority_;
  std::deque<std::function<CUresult()>> operations_;
  bool running_ = false;
  bool stopped_ = false;
  std::thread thread_;
};

}  // namespace fake
