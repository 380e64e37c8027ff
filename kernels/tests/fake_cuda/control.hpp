// SPDX-License-Identifier: Apache-2.0
//
// What a test calls to control the fake driver.
#pragma once

#include <cstdint>
#include <cstring>

#include "state.hpp"
#include "streams.hpp"

using fake::mutex;
using fake::state;

#pragma GCC visibility push(default)
extern "C" {

// To be called before the driver is first used.
void fake_configure(int version, int batches, int major, int devices, std::uint64_t alias) {
  state.version = version;
  state.batches = batches != 0;
  state.major = major;
  state.devices = devices;
  state.alias = alias;
}

void fake_delay(std::uint32_t max_us) {
  const std::lock_guard lock(mutex);
  fake::max_delay_us = max_us;
}

// The call of `name` after the next `skip` ones fails; "run" is work in a stream. A sticky failure
// ends the context.
void fake_fail(const char* name, int skip, int code, int is_sticky) {
  const std::lock_guard lock(mutex);
  state.failures[name] = {skip, static_cast<CUresult>(code), is_sticky != 0};
}

// The kernel of that name copies nothing from now on, and says nothing.
void fake_idle_kernel(const char* name) {
  const std::lock_guard lock(mutex);
  state.idle_kernels.insert(name);
}

// Only so many more kernels run, until this is called again.
void fake_allow_kernels(std::int64_t count) {
  const std::lock_guard lock(mutex);
  state.kernels_allowed = count;
  fake::changed.notify_all();
}

// Device memory of so many bytes in all.
void fake_memory(std::uint64_t bytes) {
  const std::lock_guard lock(mutex);
  state.memory_limit = bytes;
}

// The kernels are those of PTX for an older processor: 80 for sm_80.
void fake_compiled_for(int version) {
  const std::lock_guard lock(mutex);
  state.compiled_for = version;
}

// Whether the work that is put into a stream of the engine goes to a graph.
void fake_capture_stream(void* handle, int captured) {
  const std::lock_guard lock(mutex);
  if (captured != 0) {
    state.captured.insert(handle);
  } else {
    state.captured.erase(handle);
  }
}

int fake_calls(const char* name) {
  const std::lock_guard lock(mutex);
  return state.calls[name];
}

// The most thread blocks of a launch of that kernel.
int fake_grid(const char* name) {
  const std::lock_guard lock(mutex);
  return state.grids[name];
}

// Calls of that name wait from now on, or go on.
void fake_pause(const char* name, int paused) {
  const std::lock_guard lock(mutex);
  if (paused != 0) {
    state.paused.insert(name);
  } else {
    state.paused.erase(name);
  }
  fake::changed.notify_all();
}

// Whether the engine captures a graph: calls that a capture forbids fail meanwhile.
void fake_capture(int capturing) {
  const std::lock_guard lock(mutex);
  state.capturing = capturing != 0;
}

// Contexts that the calling thread has pushed, or -1 if its capture mode is not the one that it
// started with.
int fake_thread_contexts() {
  return fake::capture_mode == CU_STREAM_CAPTURE_MODE_GLOBAL
             ? static_cast<int>(fake::current.size())
             : -1;
}

// How many things of the driver exist, contexts that an ended thread left pushed among them.
int fake_live() {
  const std::lock_guard lock(mutex);
  return static_cast<int>(state.streams.size() + state.events.size() + state.registered.size() +
                          state.memory.size()) +
         state.contexts + state.modules + __atomic_load_n(&fake::leaked_contexts, __ATOMIC_RELAXED);
}

// A stream of the engine; with 1 the legacy default stream.
void* fake_stream_create(int legacy) {
  const std::lock_guard lock(mutex);
  if (legacy != 0) {
    fake::find_stream(CU_STREAM_LEGACY);
    return CU_STREAM_LEGACY;
  }
  auto stream = std::make_unique<fake::Stream>();
  void* handle = stream.get();
  state.streams[handle] = std::move(stream);
  return handle;
}

// Waits until all of the engine's work in it has run.
void fake_stream_drain(void* handle) {
  std::unique_lock lock(mutex);
  fake::Stream* stream = state.streams[handle].get();
  fake::changed.wait(lock, [&] { return stream->idle() || fake::sticky != CUDA_SUCCESS; });
}

void fake_stream_destroy(void* handle) {
  std::unique_ptr<fake::Stream> stream;
  const std::lock_guard lock(mutex);
  stream = std::move(state.streams[handle]);
  state.streams.erase(handle);
}

// Work of the engine: the stream waits until the word is not 0, then fills memory. A stream that is
// destroyed fills no more.
void fake_stream_fill(void* handle, const std::uint32_t* word, void* memory, int value,
                      std::size_t bytes) {
  const std::lock_guard lock(mutex);
  fake::Stream* stream = state.streams[handle].get();
  stream->enqueue([=] {
    while (__atomic_load_n(word, __ATOMIC_ACQUIRE) == 0) {
      if (stream->stopped()) return CUDA_SUCCESS;
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    std::memset(memory, value, bytes);
    return CUDA_SUCCESS;
  });
}
}
#pragma GCC visibility pop
