// SPDX-License-Identifier: Apache-2.0
#include "cpu_tuning.hpp"

#include <algorithm>
#include <string>

#include "copy.hpp"
#include "mover.hpp"

namespace flexkv {
namespace {

constexpr std::uint32_t kMaxThreads = 1024;

// A load waits for at most one such piece of a store on each thread, some 50 to 100 us. Measured on
// two Zen 5 cores, 512 MiB in pages of 8 to 64 KiB: 256 KiB to 1 MiB are equal within the noise.
constexpr std::uint64_t kChunkBytes = 1024 * 1024;

// The engine reads what it loaded: up to the size of the last level cache, a load through the caches
// and one read of the pages together take less time than past them (measured on a Zen 5 with 32 MiB:
// streaming takes 1.4 of the time at 512 KiB, 1.15 at 16 MiB, 0.98 at 32 MiB, 0.9 at 64 MiB). Not
// more than 32 MiB: systems also report caches that no single core can fill.
constexpr std::uint64_t kMaxStreamLoadBytes = 32 * 1024 * 1024;

// Where the system does not tell the size of the cache: that of a small desktop processor.
constexpr std::uint64_t kUnknownCacheBytes = 8 * 1024 * 1024;

// Nobody reads the arena soon after a store, and past the caches it is faster at every size (same
// machine: 0.77 to 0.85 of the time from 256 KiB to 128 MiB).
constexpr std::uint64_t kStreamStoreBytes = 1;

std::uint64_t default_stream_load_bytes() {
  const std::uint64_t cache = last_level_cache_bytes();
  return std::min(cache == 0 ? kUnknownCacheBytes : cache, kMaxStreamLoadBytes);
}

const CopyKernel* kernel_named(const char* name) {
  const CopyKernel* kernel = find_copy_kernel(name == nullptr ? "" : name);
  if (kernel == nullptr) {
    throw InvalidArgument("copy kernel '" + std::string(name) +
                          "' does not run on this processor, allowed are " + copy_kernel_names());
  }
  return kernel;
}

}  // namespace

CpuTuning tune(const fkv_cpu_options& options) {
  if (options.threads == 0 || options.threads > kMaxThreads) {
    throw InvalidArgument("threads is " + std::to_string(options.threads) +
                          ", it must be between 1 and " + std::to_string(kMaxThreads));
  }
  return {options.threads, kernel_named(options.kernel),
          options.chunk_bytes == 0 ? kChunkBytes : options.chunk_bytes,
          options.stream_bytes == 0 ? default_stream_load_bytes() : options.stream_bytes,
          options.stream_bytes == 0 ? kStreamStoreBytes : options.stream_bytes};
}

}  // namespace flexkv
