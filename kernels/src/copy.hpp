// SPDX-License-Identifier: Apache-2.0
//
// Copy kernels of the CPU mover and the choice among them.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

namespace flexkv {

// Copies `bytes` bytes between any two addresses that do not overlap. `next` is where the source of
// the following copy starts, or nullptr: it is only fetched ahead, so any address is safe.
using CopyFunction = void (*)(void* dst, const void* src, std::size_t bytes, const void* next);

// One way to copy past the caches. The stores of `stream` may be weakly ordered: a thread calls
// `fence` after its last one and before it tells another thread that the bytes are there.
struct CopyKernel {
  const char* name;
  CopyFunction stream;
  void (*fence)();
};

// Copies through the caches, with libc's memcpy.
void copy_cached(void* dst, const void* src, std::size_t bytes, const void* next);

// The kernels this processor can run, best first; never empty. Static storage.
std::span<const CopyKernel> copy_kernels();

// The kernel of that name, the best one for an empty name, nullptr if this processor has none such.
const CopyKernel* find_copy_kernel(std::string_view name);

// The names of copy_kernels(), comma separated. Static storage.
const char* copy_kernel_names();

// The last level cache in bytes, 0 if the system does not say.
std::size_t last_level_cache_bytes();

}  // namespace flexkv
