// SPDX-License-Identifier: Apache-2.0
//
// The mover for pages in CPU memory: a few threads that cut transfers into chunks.
#pragma once

#include <array>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "copy.hpp"
#include "layout.hpp"
#include "mover.hpp"
#include "ticketed_mover.hpp"

namespace flexkv {

// Checked settings; see fkv_cpu_options. Transfers of at least stream_load_bytes or
// stream_store_bytes bypass the caches.
struct CpuTuning {
  std::uint32_t threads;
  const CopyKernel* kernel;
  std::uint64_t chunk_bytes;
  std::uint64_t stream_load_bytes;
  std::uint64_t stream_store_bytes;
};

class CpuMover final : public TicketedMover {
 public:
  CpuMover(Layout layout, const CpuTuning& tuning);
  ~CpuMover() override;

  // Starts the threads; called once, before any other call. Throws std::bad_alloc, and
  // std::system_error if a thread cannot start.
  void start();

  std::uint64_t block_bytes() const override { return layout_.block_bytes(); }
  std::int64_t submit(const Batch& batch) override;
  std::int64_t mark(std::uint64_t stream) override;
  std::optional<Status> hold(std::int64_t ticket, std::uint64_t stream,
                             std::int64_t timeout_us) override;
  void close() override;
  std::string error() override { return {}; }  // copies in memory do not fail

 private:
  struct Transfer;
  using TransferPtr = std::shared_ptr<Transfer>;

  // The bytes [begin, end) of a transfer, counted over its blocks in order.
  struct Chunk {
    TransferPtr transfer;
    std::uint64_t begin;
    std::uint64_t end;
  };

  TransferPtr make_transfer(const Batch& batch) const;
  std::uint64_t chunk_bytes_for(std::uint64_t bytes) const;
  void wake_workers(const Transfer& transfer);
  void work();
  bool take_chunk(Chunk& chunk);
  void copy_chunk(const Chunk& chunk) const;
  void finish_chunk(const Chunk& chunk);
  void fail_queued();

  const Layout layout_;
  const CpuTuning tuning_;

  // Guarded by mutex_, up to threads_.
  std::condition_variable work_;
  std::array<std::deque<TransferPtr>, 2> queues_;  // by Direction: loads are taken first
  bool closing_ = false;

  std::mutex close_mutex_;  // guards threads_
  std::vector<std::thread> threads_;
};

}  // namespace flexkv
