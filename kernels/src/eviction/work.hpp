// SPDX-License-Identifier: Apache-2.0
//
// Work that is done in slices, because an engine's step waits for each call.
#pragma once

#include <coroutine>
#include <exception>
#include <utility>

namespace flexkv::eviction {

// What a slice may still do, in units of about 30 ns: 38 bins of a class.
class Budget {
 public:
  void grant(int units) noexcept { left_ = units; }

  // Waits for the next slice if this one has done its part.
  auto spend(int units) noexcept {
    left_ -= units;
    return Pause{left_ > 0};
  }

 private:
  struct Pause {
    bool ready;
    bool await_ready() const noexcept { return ready; }
    void await_suspend(std::coroutine_handle<>) const noexcept {}
    void await_resume() const noexcept {}
  };

  int left_ = 0;
};

// A coroutine that its owner resumes; nothing runs before. It ends with its owner. What it throws comes
// out of `resume`.
class Work {
 public:
  struct promise_type {
    std::exception_ptr error;
    Work get_return_object() { return Work(Handle::from_promise(*this)); }
    std::suspend_always initial_suspend() const noexcept { return {}; }
    std::suspend_always final_suspend() const noexcept { return {}; }
    void return_void() const noexcept {}
    void unhandled_exception() noexcept { error = std::current_exception(); }
  };
  using Handle = std::coroutine_handle<promise_type>;

  Work() = default;
  Work(Work&& other) noexcept : handle_(std::exchange(other.handle_, {})) {}
  Work& operator=(Work&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Work() {
    if (handle_) {
      handle_.destroy();
    }
  }

  // Whether there is nothing to do any more.
  bool done() const noexcept { return !handle_ || handle_.done(); }

  // Does the next slice. Needs `!done()`.
  void resume() {
    handle_.resume();
    if (handle_.done() && handle_.promise().error) {
      std::rethrow_exception(handle_.promise().error);
    }
  }

 private:
  explicit Work(Handle handle) noexcept : handle_(handle) {}

  Handle handle_;
};

}  // namespace flexkv::eviction
