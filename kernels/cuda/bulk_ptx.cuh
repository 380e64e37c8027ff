// SPDX-License-Identifier: Apache-2.0
//
// The instructions of bulk_copy.hpp on a device. PTX ISA, chapters "Data movement: cp.async.bulk" and
// "mbarrier", says what each does.
#pragma once

#include <cstdint>

namespace flexkv::cuda {

#if __CUDA_ARCH__ >= 900

struct BulkPtx {
  std::uint32_t staging;   // addresses in shared memory
  std::uint32_t barriers;

  __device__ void sync_warp() { __syncwarp(); }

  __device__ void fence_barriers() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

  __device__ void barrier_init(std::uint32_t barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
  }

  // Arrives, and lets the phase end only when `bytes` more bytes have come.
  __device__ void barrier_expect(std::uint32_t barrier, std::uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
  }

  // Waits for the end of the phase of that parity; what the bulk reads wrote is visible afterwards.
  __device__ void barrier_wait(std::uint32_t barrier, std::uint32_t parity) {
    std::uint32_t done = 0;
    while (done == 0) {
      asm volatile(
          "{\n"
          ".reg .pred ended;\n"
          "mbarrier.try_wait.parity.shared::cta.b64 ended, [%1], %2;\n"
          "selp.u32 %0, 1, 0, ended;\n"
          "}"
          : "=r"(done)
          : "r"(barrier), "r"(parity)
          : "memory");
    }
  }

  // Starts a copy to shared memory. Addresses and bytes are multiples of 16.
  __device__ void bulk_read(std::uint32_t staging, std::uint64_t source, std::uint32_t bytes,
                                   std::uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            staging),
        "l"(source), "r"(bytes), "r"(barrier)
        : "memory");
  }

  // Starts a copy from shared memory, as a part of this thread's current group.
  __device__ void bulk_write(std::uint64_t destination, std::uint32_t staging,
                                    std::uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(destination),
                 "r"(staging), "r"(bytes)
                 : "memory");
  }

  __device__ void bulk_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  }

  // Waits until at most `Pending` of this thread's groups still read shared memory.
  template <std::uint32_t Pending>
  __device__ void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Pending) : "memory");
  }

  // Waits until this thread's groups have written all their bytes.
  __device__ void bulk_wait_written() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
};

#endif

}  // namespace flexkv::cuda
