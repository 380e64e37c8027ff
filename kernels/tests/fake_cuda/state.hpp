// SPDX-License-Identifier: Apache-2.0
//
// What the fake driver knows, and what a test can tell it.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "streams.hpp"

namespace fake {

struct Failure {
  int countdown;  // this many calls succeed first
  CUresult code;
  bool sticky;
};

// All under fake::mutex. Never destroyed: threads of streams may outlive main.
struct State {
  int version = 13000;
  int major = 9;
  int devices = 1;
  bool batches = true;
  std::uint64_t alias = 0;  // added to host addresses to make device addresses
  std::map<std::string, int> calls;
  std::map<std::string, Failure> failures;
  std::set<std::string> idle_kernels;  // copy nothing
  std::map<void*, std::unique_ptr<Stream>> streams;
  std::map<void*, std::shared_ptr<Event>> events;
  std::map<std::uint64_t, std::uint64_t> registered;  // host address -> bytes
  std::map<std::uint64_t, std::uint64_t> memory;      // allocated: address -> bytes
  std::map<std::string, int> grids;                   // the most thread blocks of a launch
  std::map<std::string, std::uint32_t> shared_limits;  // dynamic bytes, by kernel
  std::set<std::string> paused;                       // calls that wait for the test
  std::uint64_t memory_limit = ~std::uint64_t{0};     // of all that is allocated
  std::set<void*> captured;                           // streams whose work goes to a graph
  int compiled_for = 0;                               // of kernels; 0: this device
  std::int64_t kernels_allowed = INT64_MAX;           // so many more may run
  std::uint32_t launches = 0;
  bool capturing = false;  // a thread of the engine captures a graph
  int contexts = 0;
  int modules = 0;
};

inline State& state = *new State;

// The contexts that a thread has pushed. A thread that ends with some has leaked them.
inline int leaked_contexts = 0;
struct ContextStack : std::vector<CUcontext> {
  ~ContextStack() { __atomic_add_fetch(&leaked_contexts, static_cast<int>(size()), __ATOMIC_RELAXED); }
};
inline thread_local ContextStack current;
inline thread_local CUstreamCaptureMode capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

// Counts the call, and fails it if a test wants that. With the lock held. Functions that need a
// context fail without one, and while a graph is captured unless the thread has allowed them.
inline CUresult enter(const char* name, bool needs_context = true) {
  state.calls[name] += 1;
  const auto failure = state.failures.find(name);
  if (failure != state.failures.end() && failure->second.countdown-- == 0) {
    const Failure wanted = failure->second;
    state.failures.erase(failure);
    if (wanted.sticky) {
      sticky = wanted.code;
      changed.notify_all();
    }
    return wanted.code;
  }
  if (sticky != CUDA_SUCCESS) {
    return sticky;
  }
  if (needs_context && state.capturing && capture_mode != CU_STREAM_CAPTURE_MODE_RELAXED) {
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  return needs_context && current.empty() ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS;
}

// Waits while a test wants calls of that name to wait. Without the lock.
inline void pause_point(const char* name) {
  std::unique_lock lock(mutex);
  if (state.paused.contains(name)) {
    state.calls[std::string("paused ") + name] += 1;
    changed.wait(lock, [&] { return !state.paused.contains(name); });
  }
}

// A failure of work already in a stream: the name "run" in fake_fail.
inline CUresult run_fails() {
  const std::lock_guard lock(mutex);
  return enter("run", false);
}

inline Stream* find_stream(CUstream handle) {
  if (handle == CU_STREAM_LEGACY && !state.streams.contains(handle)) {
    state.streams[handle] = std::make_unique<Stream>();
  }
  const auto found = state.streams.find(handle);
  return found == state.streams.end() ? nullptr : found->second.get();
}

inline std::shared_ptr<Event> find_event(CUevent handle) {
  const auto found = state.events.find(handle);
  return found == state.events.end() ? nullptr : found->second;
}

// The registered piece that overlaps the bytes, if any: at host addresses.
inline const std::pair<const std::uint64_t, std::uint64_t>* overlapping(std::uint64_t address,
                                                                        std::uint64_t bytes) {
  for (const auto& piece : state.registered) {
    if (address < piece.first + piece.second && piece.first < address + bytes) {
      return &piece;
    }
  }
  return nullptr;
}

// Makes a device's address one of this process. False for one that the device does not know: of
// registered memory by which only the host knows it, or beyond the end of an allocation.
inline bool resolve(std::uint64_t& address, std::uint64_t bytes) {
  if (overlapping(address - state.alias, bytes) != nullptr) {
    address -= state.alias;
    return true;
  }
  if (overlapping(address, bytes) != nullptr) {
    return false;
  }
  const auto after = state.memory.upper_bound(address);
  if (after == state.memory.begin()) {
    return true;
  }
  const auto& [start, size] = *std::prev(after);
  return address >= start + size || address + bytes <= start + size;
}

// A copy may not pass the end of a registered piece.
inline bool within_a_piece(std::uint64_t address, std::uint64_t bytes) {
  const auto* piece = overlapping(address, bytes);
  return piece == nullptr ||
         (piece->first <= address && address + bytes <= piece->first + piece->second);
}

}  // namespace fake
