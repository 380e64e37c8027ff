// SPDX-License-Identifier: Apache-2.0
//
// The fake driver's functions about memory, copies and launches.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "api_context.hpp"
#include "kernels.hpp"
#include "state.hpp"
#include "streams.hpp"

namespace fake {

inline CUresult mem_alloc(CUdeviceptr* address, std::size_t bytes) {
  ENTER("cuMemAlloc");
  std::uint64_t allocated = bytes;
  for (const auto& [start, size] : state.memory) allocated += size;
  if (allocated > state.memory_limit) return CUDA_ERROR_OUT_OF_MEMORY;
  void* memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  *address = reinterpret_cast<CUdeviceptr>(memory);
  state.memory[*address] = bytes;
  return CUDA_SUCCESS;
}

// A real driver first waits for what may still use the memory. Here a stream may be held by a test,
// so the memory is kept instead: it is little.
inline CUresult mem_free(CUdeviceptr address) {
  const std::lock_guard lock(mutex);
  state.memory.erase(address);
  return enter("cuMemFree");
}

struct Copy {
  std::uint64_t destination, source;
  std::size_t bytes;
};

// What ran on which priority, for tests to ask: "copies@-5".
inline void count_on(const std::string& what, const Stream& stream) {
  state.calls[what + "@" + std::to_string(stream.priority())] += 1;
}

// Copies of one call have no order among them: the fake takes the last one first.
inline CUresult enqueue_copies(CUstream handle, std::vector<Copy> copies, std::size_t* failed) {
  Stream* stream = find_stream(handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  for (std::size_t i = 0; i < copies.size(); ++i) {
    Copy& copy = copies[i];
    if (!resolve(copy.destination, copy.bytes) || !resolve(copy.source, copy.bytes) ||
        !within_a_piece(copy.destination, copy.bytes) || !within_a_piece(copy.source, copy.bytes)) {
      *failed = i;
      return CUDA_ERROR_INVALID_VALUE;
    }
  }
  count_on("copies", *stream);
  stream->enqueue([copies = std::move(copies)] {
    if (const CUresult result = run_fails(); result != CUDA_SUCCESS) return result;
    std::for_each(copies.rbegin(), copies.rend(), [](const Copy& copy) {
      std::memcpy(reinterpret_cast<void*>(copy.destination),
                  reinterpret_cast<const void*>(copy.source), copy.bytes);
    });
    const std::lock_guard lock(mutex);
    state.calls["copies ran"] += 1;
    return CUDA_SUCCESS;
  });
  return CUDA_SUCCESS;
}

inline CUresult mem_copy(CUdeviceptr destination, CUdeviceptr source, std::size_t bytes, CUstream stream) {
  ENTER("cuMemcpyAsync");
  std::size_t failed = 0;
  return enqueue_copies(stream, {{destination, source, bytes}}, &failed);
}

inline CUresult mem_copy_batch12(CUdeviceptr* destinations, CUdeviceptr* sources, std::size_t* sizes,
                          std::size_t count, CUmemcpyAttributes* attributes, std::size_t* first,
                          std::size_t n_attributes, std::size_t* failed, CUstream stream) {
  ENTER("cuMemcpyBatchAsync");
  if (count == 0 || n_attributes != 1 || first[0] != 0 ||
      attributes[0].srcAccessOrder != CU_MEMCPY_SRC_ACCESS_ORDER_STREAM) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  std::vector<Copy> copies(count);
  for (std::size_t i = 0; i < count; ++i) {
    copies[i] = {destinations[i], sources[i], sizes[i]};
  }
  return enqueue_copies(stream, std::move(copies), failed);
}

inline CUresult mem_copy_batch13(CUdeviceptr* destinations, CUdeviceptr* sources, std::size_t* sizes,
                          std::size_t count, CUmemcpyAttributes* attributes, std::size_t* first,
                          std::size_t n_attributes, CUstream stream) {
  std::size_t failed = 0;
  return mem_copy_batch12(destinations, sources, sizes, count, attributes, first, n_attributes,
                          &failed, stream);
}

// A device's kernel faults on what it cannot reach; here the arena's side is looked at before.
inline bool reaches(CopyBatch& batch) {
  const std::uint64_t arena = batch.arena;
  for (std::uint32_t i = 0; i < flexkv::cuda::item_count(batch); ++i) {
    const Item item = flexkv::cuda::item_at(batch, i);
    std::uint64_t address = item.arena;
    if (!resolve(address, std::uint64_t{item.tile.rows} * item.tile.row_bytes)) return false;
    batch.arena = arena + (address - item.arena);
    if (batch.arena != arena) return true;  // one alias for all of it
  }
  return true;
}

inline bool can_launch(const Launch& launch, unsigned int y, unsigned int z) {
  const auto limit = state.shared_limits.find(launch.kernel);
  const std::uint32_t shared = limit == state.shared_limits.end() ? 48 * 1024 : limit->second;
  return launch.blocks != 0 && y == 1 && z == 1 && launch.threads != 0 &&
         launch.threads % kWarpThreads == 0 && launch.threads <= thread_bound(launch.kernel) &&
         launch.shared_bytes <= shared;
}

// Waits while a test has the engine's kernels take the whole device.
inline void await_engine() {
  std::unique_lock lock(mutex);
  changed.wait(lock, [] { return state.kernels_allowed > 0 || sticky; });
  state.kernels_allowed -= 1;
}

inline CUresult launch_kernel(CUfunction function, unsigned int blocks, unsigned int blocks_y,
                              unsigned int blocks_z, unsigned int threads, unsigned int threads_y,
                              unsigned int threads_z, unsigned int shared_bytes, CUstream handle,
                              void** parameters, void** extra) {
  ENTER("cuLaunchKernel");
  Launch launch{name_of(function), blocks, threads, shared_bytes,
                *static_cast<CopyBatch*>(parameters[0])};
  Stream* stream = find_stream(handle);
  if (stream == nullptr || extra != nullptr || !can_launch(launch, blocks_y, blocks_z) ||
      threads_y != 1 || threads_z != 1) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const std::string& name = launch.kernel;
  state.calls[name] += 1;
  state.grids[name] = std::max(state.grids[name], static_cast<int>(blocks));
  count_on("kernels", *stream);
  const bool idle = state.idle_kernels.contains(name);
  const bool reached = reaches(launch.batch);
  const std::uint32_t number = state.launches++;
  stream->enqueue([launch, idle, reached, number] {
    await_engine();
    const CUresult result = run_fails();
    if (idle || result != CUDA_SUCCESS) return result;
    return reached ? run_kernel(launch, number) : CUDA_ERROR_ILLEGAL_ADDRESS;
  });
  return CUDA_SUCCESS;
}

inline CUresult host_register(void* memory, std::size_t bytes, unsigned int flags) {
  ENTER("cuMemHostRegister");
  if (flags != (CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const auto address = reinterpret_cast<std::uint64_t>(memory);
  if (overlapping(address, bytes) != nullptr) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  state.registered[address] = bytes;
  return CUDA_SUCCESS;
}

inline CUresult host_unregister(void* memory) {
  const std::lock_guard lock(mutex);
  const bool known = state.registered.erase(reinterpret_cast<std::uint64_t>(memory)) != 0;
  const CUresult result = enter("cuMemHostUnregister");
  return known ? result : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

inline CUresult host_device_pointer(CUdeviceptr* address, void* memory, unsigned int) {
  ENTER("cuMemHostGetDevicePointer");
  *address = reinterpret_cast<std::uint64_t>(memory) + state.alias;
  return CUDA_SUCCESS;
}

}  // namespace fake
