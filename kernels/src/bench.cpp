// SPDX-License-Identifier: Apache-2.0
//
// The benchmarks' yardstick: one large memcpy, cut into as many parts as there are threads.
#include <chrono>
#include <cstddef>
#include <cstring>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "flexkv/mover.h"

namespace {

using Clock = std::chrono::steady_clock;

// Threads that are joined whatever happens (std::jthread is missing from several libc++).
class Crew {
 public:
  Crew() = default;
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;
  ~Crew() {
    for (std::thread& thread : threads_) {
      thread.join();
    }
  }

  template <typename Job>
  void start(Job job) {
    threads_.emplace_back(job);
  }

 private:
  std::vector<std::thread> threads_;
};

// One repeat. Starting the threads (some 20 us each) counts, as waking the mover's threads does.
double copy_once(std::byte* dst, const std::byte* src, std::uint64_t bytes, std::uint32_t threads) {
  const std::uint64_t share = bytes / threads;
  const auto start = Clock::now();
  {
    Crew crew;
    for (std::uint64_t i = 1; i < threads; ++i) {
      crew.start([=] { std::memcpy(dst + share * i, src + share * i, share); });
    }
    std::memcpy(dst, src, share);
    std::memcpy(dst + share * threads, src + share * threads, bytes - share * threads);
  }
  return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace

int fkv_bench_memcpy(void* dst, const void* src, uint64_t bytes, uint32_t threads, uint32_t repeats,
                     double* seconds) {
  if (dst == nullptr || src == nullptr || seconds == nullptr || threads == 0) {
    return FKV_EINVAL;
  }
  try {
    for (std::uint32_t repeat = 0; repeat < repeats; ++repeat) {
      seconds[repeat] = copy_once(static_cast<std::byte*>(dst), static_cast<const std::byte*>(src),
                                  bytes, threads);
    }
  } catch (const std::bad_alloc&) {
    return FKV_ENOMEM;
  } catch (const std::system_error&) {
    return FKV_ENOMEM;
  }
  return 0;
}
