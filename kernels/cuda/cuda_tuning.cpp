// SPDX-License-Identifier: Apache-2.0
#include "cuda_tuning.hpp"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <limits>
#include <string>

#include "mover.hpp"
#include "staged_copies.hpp"

namespace flexkv::cuda {
namespace {

constexpr std::uint32_t kMaxThreadBlocks = 1024;

// What follows is tuned on nothing yet: it is what others report, for devices that were not measured.

// Of kernels that drive the link: 12 of 132 multiprocessors (vLLM) to 4 of 152 with bulk copies (SGLang).
constexpr std::uint32_t kLinkThreadBlocks = 8;

// Of kernels within device memory, of one warp each: one with 8 KiB in flight copies some 8 GB/s, and so
// many more than the link.
constexpr std::uint32_t kStagedThreadBlocks = 16;

// From here on a copy engine reaches 39 to 52 of 55 GB/s (vllm#42212).
constexpr std::uint64_t kLongRun = 64 * 1024;

// The same of runs in the arena alone: what a copy engine loses with these, a kernel that drives the link
// loses, too, and takes multiprocessors for it.
constexpr std::uint64_t kLongSlotRun = 32 * 1024;

// Segments of 8 MiB: see staged_copies.cpp.
constexpr std::uint64_t kRingBytes = std::uint64_t{64} << 20;
constexpr std::uint64_t kMaxRingBytes = std::uint64_t{1} << 30;

// Longer runs are as fast as these.
constexpr std::uint64_t kLongestClass = std::uint64_t{1} << 20;

int power_of(std::uint64_t bytes) {
  return static_cast<int>(std::bit_width(std::clamp<std::uint64_t>(bytes, 1, kLongestClass)));
}

// What was measured for runs of one length holds for twice and half of it, and for all long runs. Not
// tuned yet.
bool alike(int power, int other) {
  const int most = power_of(kLongRun);
  return std::abs(std::min(power, most) - std::min(other, most)) <= 1;
}

std::optional<Path> path_of(const std::string& name, std::uint32_t mode) {
  switch (mode) {
    case FKV_CUDA_AUTO:
      return std::nullopt;
    case FKV_CUDA_DMA:
      return Path::driver;
    case FKV_CUDA_KERNEL:
      return Path::kernel;
    case FKV_CUDA_TMA:
      return Path::bulk_kernel;
    case FKV_CUDA_STAGED:
      return Path::staged;
    default:
      throw InvalidArgument(name + " is " + std::to_string(mode) +
                            ", it must be 0 (auto), 1 (DMA), 2 (kernel), 3 (TMA) or 4 (staged)");
  }
}

void check_thread_blocks(std::uint32_t thread_blocks) {
  if (thread_blocks > kMaxThreadBlocks) {
    throw InvalidArgument("thread_blocks is " + std::to_string(thread_blocks) +
                          ", it must be at most " + std::to_string(kMaxThreadBlocks));
  }
}

std::uint32_t default_thread_blocks(Path path) {
  return path == Path::staged ? kStagedThreadBlocks : kLinkThreadBlocks;
}

}  // namespace

RunClass class_of(Direction direction, std::uint64_t run_bytes, std::uint64_t slot_run_bytes) {
  return {direction, power_of(run_bytes), power_of(slot_run_bytes)};
}

// A transfer is rarely of just the class that was measured: its blocks may be neighbours in the arena, and
// layers need not fill parts evenly.
const Way* CudaTuning::measured(const RunClass& wanted) const {
  const auto [direction, run, slot_run] = wanted;
  const Way* nearest = nullptr;
  int least = std::numeric_limits<int>::max();
  for (const auto& [known, way] : choices) {
    const auto [known_direction, known_run, known_slot_run] = known;
    const int distance = std::abs(known_run - run) + std::abs(known_slot_run - slot_run);
    if (known_direction == direction && alike(known_run, run) && alike(known_slot_run, slot_run) &&
        distance < least) {
      nearest = &way;
      least = distance;
    }
  }
  return nearest;
}

Way CudaTuning::choose(Direction direction, std::uint64_t run_bytes,
                       std::uint64_t slot_run_bytes) const {
  Way way{Path::kernel, 0};
  const Way* known = measured(class_of(direction, run_bytes, slot_run_bytes));
  if (forced.has_value()) {
    way.path = *forced;
  } else if (known != nullptr) {
    way = *known;
  } else if (run_bytes >= kLongRun) {
    way.path = Path::driver;
  } else if (slot_run_bytes >= kLongSlotRun) {
    way.path = Path::staged;
  }
  if (thread_blocks != 0) {
    way.thread_blocks = thread_blocks;
  } else if (way.thread_blocks == 0) {
    way.thread_blocks = default_thread_blocks(way.path);
  }
  return way;
}

Way forced_way(std::uint32_t mode, std::uint32_t thread_blocks) {
  const std::optional<Path> path = path_of("mode", mode);
  if (!path.has_value()) {
    throw InvalidArgument("mode is 0 (auto), it must be one of the others");
  }
  check_thread_blocks(thread_blocks);
  return {*path, thread_blocks};
}

CudaTuning tune(const fkv_cuda_options& options) {
  CudaTuning tuning{path_of("mode", options.mode), options.thread_blocks,
                    options.ring_bytes == 0 ? kRingBytes : options.ring_bytes, {}};
  check_thread_blocks(options.thread_blocks);
  if (tuning.ring_bytes > kMaxRingBytes || tuning.ring_bytes < StagedCopies::kMinRingBytes) {
    throw InvalidArgument("ring_bytes is " + std::to_string(options.ring_bytes) +
                          ", it must be between " + std::to_string(StagedCopies::kMinRingBytes) +
                          " and " + std::to_string(kMaxRingBytes));
  }
  if (tuning.forced.has_value() && tuning.forced != Path::staged) {
    tuning.ring_bytes = 0;
  }
  for (std::uint32_t i = 0; i < options.n_choices; ++i) {
    const fkv_cuda_choice& choice = options.choices[i];
    const std::string name = "choice " + std::to_string(i) + ": ";
    if (choice.direction > FKV_STORE) {
      throw InvalidArgument(name + "direction is " + std::to_string(choice.direction) +
                            ", it must be 0 (load) or 1 (store)");
    }
    const std::optional<Path> path = path_of(name + "mode", choice.mode);
    if (!path.has_value()) {
      throw InvalidArgument(name + "mode is 0 (auto), it must be one of the others");
    }
    check_thread_blocks(choice.thread_blocks);
    tuning.choices[class_of(static_cast<Direction>(choice.direction), choice.run_bytes,
                            choice.slot_run_bytes)] = {*path, choice.thread_blocks};
  }
  return tuning;
}

}  // namespace flexkv::cuda
