// SPDX-License-Identifier: Apache-2.0
#include "cpu_mover.hpp"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "flag.hpp"
#include "geometry.hpp"

namespace flexkv {
namespace {

// Chunks are a multiple of this: pages seldom fall apart, and waking a thread for less (some
// microseconds, in which another one copies as much at 10 to 20 GB/s) would not pay.
constexpr std::uint64_t kChunkMultiple = 64 * 1024;

constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

std::byte* page_pointer(const Run& run) {
  return reinterpret_cast<std::byte*>(run.page_address);
}

std::int64_t nanoseconds_since(std::chrono::steady_clock::time_point begun) {
  const auto taken = std::chrono::steady_clock::now() - begun;
  return std::max<std::int64_t>(
      1, std::chrono::duration_cast<std::chrono::nanoseconds>(taken).count());
}

// The name is for top, perf and the like; systems that let a thread name only itself go without.
void name_thread(std::thread& thread) {
#if defined(__linux__)
  pthread_setname_np(thread.native_handle(), "flexkv-mover");
#else
  static_cast<void>(thread);
#endif
}

}  // namespace

struct CpuMover::Transfer {
  Direction direction;
  Geometry geometry;
  std::vector<std::uint64_t> blocks;
  std::vector<std::uint64_t> offsets;
  std::uint32_t* flag;
  std::uint64_t bytes;        // of the whole transfer
  std::uint64_t chunk_bytes;  // a thread takes so many at a time
  bool stream;                // past the caches
  std::int64_t ticket = 0;
  std::uint64_t taken = 0;   // bytes handed to threads, a prefix
  std::uint64_t copied = 0;  // bytes in place, as a sum
  std::chrono::steady_clock::time_point begun;  // once some are taken
};

CpuMover::CpuMover(Layout layout, const CpuTuning& tuning)
    : layout_(std::move(layout)), tuning_(tuning) {}

void CpuMover::start() {
  const std::lock_guard lock(close_mutex_);
  threads_.reserve(tuning_.threads);
  while (threads_.size() < tuning_.threads) {
    name_thread(threads_.emplace_back(&CpuMover::work, this));
  }
}

CpuMover::~CpuMover() { close(); }

std::int64_t CpuMover::submit(const Batch& batch) {
  require_own_process();
  if (batch.after != 0) {
    throw InvalidArgument("after is " + std::to_string(batch.after) +
                          ", the CPU mover has no streams and takes only 0");
  }
  if (batch.mark != 0) {
    throw InvalidArgument("mark is " + std::to_string(batch.mark) +
                          ", the CPU mover makes none and takes only 0");
  }
  require_aligned(batch.flag);
  layout_.check(batch);
  TransferPtr transfer = make_transfer(batch);
  const std::lock_guard lock(mutex_);
  if (closing_) {
    throw Closed("the mover is closed");
  }
  if (transfer->bytes == 0) {
    raise_flag(batch.flag, Status::done);
    return tickets_.issue_done();
  }
  auto& queue = queues_[static_cast<std::size_t>(batch.direction)];
  queue.push_back(transfer);
  try {
    transfer->ticket = tickets_.issue_pending();
  } catch (const std::bad_alloc&) {
    queue.pop_back();
    throw;
  }
  wake_workers(*transfer);
  return transfer->ticket;
}

std::int64_t CpuMover::mark(std::uint64_t stream) {
  throw InvalidArgument("stream is " + std::to_string(stream) + ", the CPU mover has none to mark");
}

std::optional<Status> CpuMover::hold(std::int64_t ticket, std::uint64_t stream,
                                     std::int64_t timeout_us) {
  if (stream != 0) {
    throw InvalidArgument("stream is " + std::to_string(stream) +
                          ", the CPU mover has none and takes only 0");
  }
  return wait(ticket, timeout_us);
}

CpuMover::TransferPtr CpuMover::make_transfer(const Batch& batch) const {
  auto transfer = std::make_shared<Transfer>();
  transfer->direction = batch.direction;
  transfer->geometry = layout_.geometry(batch);
  const std::uint64_t bytes = batch.n * transfer->geometry.block_bytes;
  transfer->blocks.assign(batch.blocks, batch.blocks + batch.n);
  transfer->offsets.assign(batch.offsets, batch.offsets + batch.n);
  transfer->flag = batch.flag;
  transfer->bytes = bytes;
  transfer->chunk_bytes = chunk_bytes_for(bytes);
  // Parts of a load follow one another through the caches: what counts is the whole.
  transfer->stream = batch.n * layout_.block_bytes() >= (batch.direction == Direction::load
                                                             ? tuning_.stream_load_bytes
                                                             : tuning_.stream_store_bytes);
  return transfer;
}

// Small transfers are cut so that every thread gets a part of them.
std::uint64_t CpuMover::chunk_bytes_for(std::uint64_t bytes) const {
  const std::uint64_t share = bytes / tuning_.threads + 1;
  return std::min(tuning_.chunk_bytes, round_up(share, std::min(kChunkMultiple, tuning_.chunk_bytes)));
}

void CpuMover::wake_workers(const Transfer& transfer) {
  const std::uint64_t chunks = (transfer.bytes - 1) / transfer.chunk_bytes + 1;
  for (std::uint64_t i = 0; i < std::min<std::uint64_t>(chunks, tuning_.threads); ++i) {
    work_.notify_one();
  }
}

void CpuMover::close() {
  if (orphaned()) {
    return;
  }
  const std::lock_guard close_lock(close_mutex_);
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  work_.notify_all();
  for (std::thread& thread : threads_) {
    thread.join();
  }
  threads_.clear();
  fail_queued();
}

void CpuMover::fail_queued() {
  const std::lock_guard lock(mutex_);
  for (auto& queue : queues_) {
    for (const TransferPtr& transfer : queue) {
      raise_flag(transfer->flag, Status::failed);
    }
    queue.clear();
  }
  tickets_.fail_pending();
  finished_.notify_all();
}

void CpuMover::work() {
  for (Chunk chunk; take_chunk(chunk); chunk = {}) {
    copy_chunk(chunk);
    finish_chunk(chunk);
  }
}

// The next chunk, of a load if there is one; sleeps while there is none. False when closing.
bool CpuMover::take_chunk(Chunk& chunk) {
  std::unique_lock lock(mutex_);
  work_.wait(lock, [&] { return closing_ || !queues_[0].empty() || !queues_[1].empty(); });
  if (closing_) {
    return false;
  }
  auto& queue = queues_[queues_[0].empty() ? 1 : 0];
  Transfer& transfer = *queue.front();
  chunk.transfer = queue.front();
  chunk.begin = transfer.taken;
  if (transfer.taken == 0) {
    transfer.begun = std::chrono::steady_clock::now();
  }
  chunk.end = std::min(transfer.taken + transfer.chunk_bytes, transfer.bytes);
  transfer.taken = chunk.end;
  if (transfer.taken == transfer.bytes) {
    queue.pop_front();
  }
  return true;
}

void CpuMover::copy_chunk(const Chunk& chunk) const {
  const Transfer& transfer = *chunk.transfer;
  const bool load = transfer.direction == Direction::load;
  const CopyFunction copy = transfer.stream ? tuning_.kernel->stream : copy_cached;
  RunCursor cursor(transfer.geometry, transfer.blocks.data(), transfer.offsets.data(), chunk.begin,
                   chunk.end);
  const auto source = [&](const Run& run) {
    return load ? layout_.arena() + run.arena_offset : page_pointer(run);
  };
  const auto destination = [&](const Run& run) {
    return load ? page_pointer(run) : layout_.arena() + run.arena_offset;
  };
  Run run;
  Run next;
  for (bool more = cursor.next(run); more; run = next) {
    more = cursor.next(next);
    copy(destination(run), source(run), run.bytes, more ? source(next) : nullptr);
  }
  tuning_.kernel->fence();
}

void CpuMover::finish_chunk(const Chunk& chunk) {
  const std::lock_guard lock(mutex_);
  Transfer& transfer = *chunk.transfer;
  transfer.copied += chunk.end - chunk.begin;
  if (transfer.copied == transfer.bytes) {
    raise_flag(transfer.flag, Status::done);
    tickets_.finish(transfer.ticket, nanoseconds_since(transfer.begun));
    finished_.notify_all();
  }
}

}  // namespace flexkv
