// SPDX-License-Identifier: Apache-2.0
//
// The C ABI of FlexKV's movers: copies between the pages of an engine's KV cache and an arena.
//
// Terms
//   engine block  one block of the engine's paged KV cache, numbered 0 .. num_blocks-1.
//   plane         one contiguous piece ("page") that every engine block has, say one layer: the page
//                 of engine block b is `page_bytes` bytes at `base + b * block_stride`.
//   block_bytes   the sum of page_bytes over all planes. In the arena a block is `block_bytes` bytes
//                 in which its pages follow one another in plane order, without gaps.
//   transfer      one batch of block copies in one direction, named by a ticket.
//
// Ownership. A mover owns its threads (or streams) and nothing else: the planes' memory and the arena
// belong to the caller and must stay mapped, at the same addresses, until the mover is closed. All
// arrays and strings passed in are copied before the call returns.
//
// Thread-safety. Every function may be called from any thread at any time, except that
// fkv_mover_destroy must be the last call on a mover and overlap no other. Submit and poll never wait
// for a copy: they take one lock that is held for short bookkeeping only.
//
// Processes. A mover belongs to the process that created it. In a child of fork() every call on it
// returns FKV_ECLOSED and destroying it does nothing. Any number of processes may have movers over
// the same shared memory.
//
// Order. Transfers of one mover are not ordered with one another: loads overtake queued stores, and
// several run at once. A transfer must not write bytes that a pending transfer reads or writes; wait
// for the first one. Within one load, naming the same engine block twice with different offsets
// leaves either source in it, page by page.
#ifndef FLEXKV_MOVER_H
#define FLEXKV_MOVER_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__) || defined(__clang__)
#define FKV_API __attribute__((visibility("default")))
#else
#define FKV_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

// Raised whenever a declaration below changes incompatibly. Callers compare it with
// fkv_abi_version() before any other call.
#define FKV_ABI_VERSION 1

// Directions of a transfer.
enum { FKV_LOAD = 0 /* arena -> pages */, FKV_STORE = 1 /* pages -> arena */ };

// States of a transfer; also the values of a completion flag.
enum { FKV_PENDING = 0, FKV_DONE = 1, FKV_FAILED = 2 };

// Errors. Always negative, so that they never meet a ticket or a state.
enum {
  FKV_EINVAL = -1,   // an argument is out of range; nothing was queued and no byte was touched
  FKV_ECLOSED = -2,  // the mover is closed, or belongs to the process this one was forked from
  FKV_ENOMEM = -3    // no memory for the transfer's bookkeeping; nothing was queued
};

// One plane: addresses and sizes in bytes, of any alignment; block_stride >= page_bytes > 0.
typedef struct {
  uint64_t base;
  uint64_t block_stride;
  uint64_t page_bytes;
} fkv_plane;

// Settings of the CPU mover. Zero (NULL) means "chosen by the library" for each optional field.
typedef struct {
  uint32_t threads;       // 1 .. 1024 copying threads; required
  const char* kernel;     // optional: a name from fkv_cpu_kernels()
  uint64_t chunk_bytes;   // optional: largest piece of a transfer one thread takes at a time
  uint64_t stream_bytes;  // optional: transfers of at least so many bytes bypass the caches;
                          // by default every store, and loads as large as the last level cache
} fkv_cpu_options;

typedef struct fkv_mover fkv_mover;

FKV_API uint32_t fkv_abi_version(void);

// Copy kernels this processor can run, best first, comma separated ("avx512,avx2,portable").
// Static storage.
FKV_API const char* fkv_cpu_kernels(void);

// Makes a mover over CPU memory. `arena` is the start of arena_bytes bytes mapped in this process.
// The threads inherit the CPU affinity of the calling thread. Returns NULL on failure and writes a
// message of at most err_len bytes, terminator included, to err (err may be NULL).
FKV_API fkv_mover* fkv_cpu_mover_create(const fkv_plane* planes, uint32_t n_planes,
                                        uint64_t num_blocks, void* arena, uint64_t arena_bytes,
                                        const fkv_cpu_options* options, char* err, size_t err_len);

// Bytes of one engine block over all planes.
FKV_API uint64_t fkv_mover_block_bytes(const fkv_mover* mover);

// Queues n copies; copy i moves all planes of engine block blocks[i] from or to
// arena[offsets[i] .. offsets[i] + block_bytes). Any offset alignment works; multiples of 64 are
// fastest. n == 0 completes at once.
//
// after  handle of the work that must finish before the first byte is read: a CUDA stream for a GPU
//        mover. A CPU mover takes only 0: what the caller did before the call is done.
// flag   NULL, or the address of a 4-aligned uint32_t, also in shared memory, which becomes FKV_DONE
//        or FKV_FAILED with release order once every byte is in place. The caller sets it to
//        FKV_PENDING before the call. It must stay mapped until the ticket is no longer pending; it
//        is written before fkv_mover_poll and fkv_mover_wait report the end.
//
// Returns a ticket >= 1, or FKV_EINVAL, FKV_ECLOSED or FKV_ENOMEM with a message in err. All blocks
// and offsets are checked before anything is queued.
FKV_API int64_t fkv_mover_submit(fkv_mover* mover, int direction, const uint64_t* blocks,
                                 const uint64_t* offsets, uint64_t n, uint64_t after, uint32_t* flag,
                                 char* err, size_t err_len);

// FKV_PENDING, FKV_DONE or FKV_FAILED; FKV_EINVAL for a number that was never a ticket. Asking again
// gives the same answer: nothing has to be released, since only pending and failed tickets take
// memory. A reader that saw FKV_DONE sees all bytes of the transfer.
FKV_API int fkv_mover_poll(fkv_mover* mover, int64_t ticket);

// The same, waiting until the transfer ends or timeout_us microseconds have passed (<= 0: poll).
FKV_API int fkv_mover_wait(fkv_mover* mover, int64_t ticket, int64_t timeout_us);

// Stops the mover: pieces being copied are finished, what is queued is dropped and becomes
// FKV_FAILED, threads are joined. When it returns, no memory of the caller is touched any more.
// Later submits return FKV_ECLOSED; poll and wait keep answering. May be called repeatedly.
FKV_API void fkv_mover_close(fkv_mover* mover);

// Closes the mover and frees it. NULL is ignored.
FKV_API void fkv_mover_destroy(fkv_mover* mover);

// The yardstick of the benchmarks: copies bytes from src to dst with libc's memcpy, one contiguous
// part per thread, `repeats` times with the same threads. Writes the seconds of each repeat to
// `seconds` (repeats doubles). Returns 0, FKV_EINVAL or FKV_ENOMEM.
FKV_API int fkv_bench_memcpy(void* dst, const void* src, uint64_t bytes, uint32_t threads,
                             uint32_t repeats, double* seconds);

#ifdef __cplusplus
}
#endif

#endif  // FLEXKV_MOVER_H
