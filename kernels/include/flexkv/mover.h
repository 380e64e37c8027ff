// SPDX-License-Identifier: Apache-2.0
//
// The C ABI of FlexKV's movers: copies between the pages of an engine's KV cache and an arena.
//
// Terms
//   engine block  one block of the engine's paged KV cache, numbered 0 .. num_blocks-1.
//   plane         one piece ("page") that every engine block has, say one head of one layer: rows of
//                 equal length at equal distances. In the arena a page's rows follow one another
//                 without gaps, `slot_offset` bytes behind the place that a copy names.
//   span          from the place that a copy names to the end of the page that lies furthest behind
//                 it: max(slot_offset + rows * row_bytes) over all planes.
//   transfer      one batch of block copies in one direction, named by a ticket.
//
// Shares. Ranks that hold the same bytes store a part of them each, and load them all: a store copies
// only the planes [store_first, store_first + store_count).
//
// Parts. A transfer copies a range of the planes: one that an engine needs layer by layer is submitted
// as several. Planes are numbered as the layout lists them, whatever their places in the arena.
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
// Order. Loads are taken up in the order of their submission, each with all threads, and so are
// stores; but loads overtake stores, and a transfer is taken up before the one before it has ended:
// none has certainly ended because a later one has. A transfer must not write bytes that a pending transfer reads or
// writes; wait for the first one. Within one load, naming the same engine block twice with different offsets
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
#define FKV_ABI_VERSION 13

// Directions of a transfer.
enum { FKV_LOAD = 0 /* arena -> pages */, FKV_STORE = 1 /* pages -> arena */ };

// States of a transfer; also the values of a completion flag.
enum { FKV_PENDING = 0, FKV_DONE = 1, FKV_FAILED = 2 };

// Of fkv_mover_hold alone.
enum { FKV_HELD = 3 };

// Errors. Always negative, so that they never meet a ticket or a state.
enum {
  FKV_EINVAL = -1,   // an argument is out of range; nothing was queued and no byte was touched
  FKV_ECLOSED = -2,  // the mover is closed, belongs to the process this one was forked from, or its
                     // device has failed
  FKV_ENOMEM = -3    // no memory for the transfer's bookkeeping; nothing was queued
};

// One plane: row r of engine block b is row_bytes bytes at base + b * block_stride + r * row_stride.
// All in bytes, of any alignment; rows > 0, row_stride >= row_bytes > 0, block_stride >= row_bytes.
typedef struct {
  uint64_t base;
  uint64_t block_stride;
  uint64_t rows;
  uint64_t row_stride;
  uint64_t row_bytes;
  uint64_t slot_offset;
} fkv_plane;

// Where the bytes are. No two planes may share bytes, among the pages or in the arena.
typedef struct {
  const fkv_plane* planes;
  uint32_t n_planes;
  uint32_t store_first;  // of the planes that stores copy
  uint32_t store_count;  // 0: stores copy nothing, and complete
  uint64_t num_blocks;
  void* arena;  // start of arena_bytes bytes mapped in this process
  uint64_t arena_bytes;
} fkv_layout;

// Settings of the CPU mover. Zero (NULL) means "chosen by the library" for each optional field.
typedef struct {
  uint32_t threads;       // 1 .. 1024 copying threads; required
  const char* kernel;     // optional: a name from fkv_cpu_kernels()
  uint64_t chunk_bytes;   // optional: largest piece of a transfer one thread takes at a time
  uint64_t stream_bytes;  // optional: transfers of at least so many bytes bypass the caches, a part
                          // of the planes counted as all; by default every store, and loads as
                          // large as the last level cache
} fkv_cpu_options;

// Ways of a CUDA mover's copies.
enum {
  FKV_CUDA_AUTO = 0,    // one of the others for each transfer, as `choices` name them
  FKV_CUDA_DMA = 1,     // copy engines, one descriptor for each run contiguous on both sides
  FKV_CUDA_KERNEL = 2,  // a kernel on a few multiprocessors
  FKV_CUDA_TMA = 3,     // a kernel over bulk copies (compute capability >= 9.0); blocks whose addresses
                        // or lengths are no multiples of 16 go as by FKV_CUDA_KERNEL
  FKV_CUDA_STAGED = 4   // copy engines between the arena and a ring in device memory, a kernel between
                        // the ring and the pages; as by FKV_CUDA_KERNEL where device memory is too
                        // short for any ring
};

// The way of transfers of one class: those whose runs have on average this length, up to the next power
// of two. A run is contiguous among the pages and in the arena, a slot run in the arena alone. Lengths
// from 1 MiB on are one class.
typedef struct {
  uint32_t direction;  // FKV_LOAD or FKV_STORE
  uint32_t mode;       // FKV_CUDA_*, not AUTO
  uint64_t run_bytes;
  uint64_t slot_run_bytes;
  uint32_t thread_blocks;  // optional: as in fkv_cuda_options
} fkv_cuda_choice;

// Settings of the CUDA mover. Zero (NULL) means "chosen by the library" for each optional field.
typedef struct {
  int32_t device;  // ordinal, as the driver numbers the devices it shows this process
  uint32_t mode;   // FKV_CUDA_*
  // For FKV_CUDA_AUTO. A transfer of another class goes the way of the nearest one whose lengths differ by
  // at most one power of two; those of 64 KiB and more count as equal. If there is none, it goes by DMA
  // if its runs have 64 KiB or more, staged if its slot runs have 32 KiB, and else by FKV_CUDA_KERNEL.
  const fkv_cuda_choice* choices;
  uint32_t n_choices;
  uint32_t thread_blocks;  // optional: the most of one launch, that is, multiprocessors it occupies; of
                           // FKV_CUDA_STAGED blocks of one warp, which fit beside others
  uint64_t ring_bytes;     // optional: of the ring of each direction; smaller where device memory is short
  const char* driver;      // optional: the driver's library instead of libcuda.so.1
} fkv_cuda_options;

// A CUDA device; strings end with 0.
typedef struct {
  char name[128];
  char pci_bus_id[32];  // as Linux writes it: "0000:18:00.0"
  int32_t major;        // compute capability
  int32_t minor;
  int32_t multiprocessors;
  int32_t driver_version;  // CUDA version of the driver, 1000 * major + 10 * minor
} fkv_cuda_device;

typedef struct fkv_mover fkv_mover;

FKV_API uint32_t fkv_abi_version(void);

// Copy kernels this processor can run, best first, comma separated ("avx512,avx2,portable").
// Static storage.
FKV_API const char* fkv_cpu_kernels(void);

// Makes a mover over CPU memory. The threads inherit the CPU affinity of the calling thread. Returns
// NULL on failure and writes a message of at most err_len bytes, terminator included, to err (err may
// be NULL).
FKV_API fkv_mover* fkv_cpu_mover_create(const fkv_layout* layout, const fkv_cpu_options* options,
                                        char* err, size_t err_len);

// CUDA. The driver is looked for at run time. The first of these calls that finds it initialises it
// in this process, after which no forked child can use CUDA: call them where the engine uses its GPU.
// `driver` is as in fkv_cuda_options.

// How many devices the driver shows this process, at least 1; or FKV_EINVAL and in err why there is
// no CUDA mover here: a library built without it, no driver, one that is too old, no device.
FKV_API int fkv_cuda_devices(const char* driver, char* err, size_t err_len);

// Describes one device. 0, or FKV_EINVAL with a message in err.
FKV_API int fkv_cuda_describe(const char* driver, int32_t device, fkv_cuda_device* out, char* err,
                              size_t err_len);

// Makes a mover over the memory of a CUDA device, in the device's primary context, which engines use
// too. The arena is registered with the driver (page-locked; movers of one process over the same
// arena share that) and unregistered by fkv_mover_close of its last mover. One thread is started.
// Returns NULL on failure with a message in err.
FKV_API fkv_mover* fkv_cuda_mover_create(const fkv_layout* layout, const fkv_cuda_options* options,
                                         char* err, size_t err_len);

// Makes all later transfers of a CUDA mover go one way, for measurements: `mode` is not FKV_CUDA_AUTO,
// thread_blocks is as in fkv_cuda_options, and of each ring no more than ring_bytes are used; 0 is all of
// it. No transfer may be pending. 0, or FKV_EINVAL, also where the device or the mover lacks what the way
// takes, or FKV_ECLOSED, with a message in err.
FKV_API int fkv_cuda_mover_force(fkv_mover* mover, uint32_t mode, uint32_t thread_blocks,
                                 uint64_t ring_bytes, char* err, size_t err_len);

// Bytes of the ring of each direction of a CUDA mover: fewer than it was asked for where device memory is
// short; 0 without rings, and for a CPU mover.
FKV_API uint64_t fkv_cuda_mover_ring_bytes(const fkv_mover* mover);

// Memory of a device for measurements. 0 on failure, with a message in err.
FKV_API uint64_t fkv_cuda_alloc(const char* driver, int32_t device, uint64_t bytes, char* err,
                                size_t err_len);
FKV_API void fkv_cuda_free(uint64_t address);

// Bytes of one engine block over all planes.
FKV_API uint64_t fkv_mover_block_bytes(const fkv_mover* mover);

// Queues n copies; copy i moves planes [first_plane, first_plane + n_planes) of engine block blocks[i]
// from or to their places behind arena[offsets[i]], where a whole span must fit, whatever the planes.
// Any offset alignment works; multiples of 64 are fastest. A store copies those of the planes that are
// in the share. What has nothing to copy completes at once.
//
// after  what must finish before the first byte is read or written. For a CUDA mover a stream
//        (CUstream) of the device's primary context: the copies follow all work that is in the stream
//        when this is called. 1 is the legacy default stream. 0 is nothing: the only value that a
//        CPU mover takes. The stream must exist and not be captured.
// mark   0, or what fkv_mover_mark returned: the copies follow the work that was marked instead, and
//        `after` is not used.
// flag   NULL, or the address of a 4-aligned uint32_t, also in shared memory, which becomes FKV_DONE
//        or FKV_FAILED with release order once every byte is in place. The caller sets it to
//        FKV_PENDING before the call. It must stay mapped until the ticket is no longer pending; it
//        is written before fkv_mover_poll and fkv_mover_wait report the end. A CUDA mover writes
//        flags within the arena from the device, up to some 0.1 ms earlier than it knows the end.
//
// Returns a ticket >= 1, or FKV_EINVAL, FKV_ECLOSED or FKV_ENOMEM with a message in err. All planes,
// blocks and offsets are checked before anything is queued.
FKV_API int64_t fkv_mover_submit(fkv_mover* mover, int direction, const uint64_t* blocks,
                                 const uint64_t* offsets, uint64_t n, uint32_t first_plane,
                                 uint32_t n_planes, uint64_t after, int64_t mark, uint32_t* flag,
                                 char* err, size_t err_len);

// How many marks a mover keeps.
#define FKV_MARKS 32

// Marks the work that is in a stream now, so that later transfers can follow it and no work that is put
// into the stream meanwhile. `stream` is as `after` of fkv_mover_submit, but not 0. Takes an event's
// record: a microsecond. Returns a number >= 1 that grows by 1; the last FKV_MARKS can be used. Or
// FKV_EINVAL (a CPU mover has no streams), FKV_ECLOSED or FKV_ENOMEM with a message in err.
FKV_API int64_t fkv_mover_mark(fkv_mover* mover, uint64_t stream, char* err, size_t err_len);

// FKV_PENDING, FKV_DONE or FKV_FAILED; FKV_EINVAL for a number that was never a ticket. Asking again
// gives the same answer: nothing has to be released, since only pending and failed tickets take
// memory. A reader that saw FKV_DONE sees all bytes of the transfer.
FKV_API int fkv_mover_poll(fkv_mover* mover, int64_t ticket);

// The same, waiting until the transfer ends or timeout_us microseconds have passed (<= 0: poll).
FKV_API int fkv_mover_wait(fkv_mover* mover, int64_t ticket, int64_t timeout_us);

// How long the copies of a transfer took, in nanoseconds and at least 1: from its first byte to its
// last, by the clock of the thread or the device that copies. What the transfer waited before that,
// in a queue or for `after`, is not in it. 0 if that is not known: the transfer is pending, has failed
// or had nothing to copy, or 4,096 others have been submitted since; FKV_EINVAL for a number that was
// never a ticket, FKV_ECLOSED in a child of fork().
FKV_API int64_t fkv_mover_copy_ns(fkv_mover* mover, int64_t ticket);

// Makes a stream of the caller follow a transfer: the work that is put into it after this call runs
// once every byte is in place, or once the transfer has failed. `stream` is as `after` of
// fkv_mover_submit, and must not be captured; with 0 it is the caller itself that waits, as in
// fkv_mover_wait, and a CPU mover takes nothing else.
//
// FKV_HELD: the stream follows; how the transfer ended is still to be polled for. FKV_DONE and
// FKV_FAILED: it had ended, and the stream was left alone. FKV_PENDING: timeout_us have passed, and the
// stream does not follow. FKV_EINVAL for what was never a ticket or is no stream, FKV_ECLOSED and
// FKV_ENOMEM, with a message in err; the stream does not follow then.
//
// A stream can only follow copies that the device has been given, which this waits for: microseconds,
// unless more is pending than the device is given at a time (some 1000 copies, 32 transfers, or the bytes
// of a ring). Then it waits until enough of that has been copied, which for a load takes no later work of
// the caller.
FKV_API int fkv_mover_hold(fkv_mover* mover, int64_t ticket, uint64_t stream, int64_t timeout_us,
                           char* err, size_t err_len);

// Writes the bytes of the copies given to a CUDA mover's device, by way: out[FKV_CUDA_DMA] and so on up to
// FKV_CUDA_STAGED, and in out[FKV_CUDA_AUTO] those that went another way than was chosen, because the
// device, the ring or addresses did not allow it. All 0 for a CPU mover. May be called at any time.
FKV_API void fkv_mover_path_bytes(const fkv_mover* mover, uint64_t out[5]);

// Why a transfer failed other than by fkv_mover_close: writes the message of the last such failure to
// err and returns 1; 0 if there was none. A driver call that fails concerns one transfer. After an
// error of the device's context (a fault in any kernel of the process) all transfers fail, and
// submits return FKV_ECLOSED with the same message.
FKV_API int fkv_mover_error(fkv_mover* mover, char* err, size_t err_len);

// Stops the mover: pieces being copied are finished, what is queued is dropped and becomes
// FKV_FAILED, threads are joined. When it returns, no memory of the caller is touched any more.
// Later submits return FKV_ECLOSED; poll and wait keep answering. May be called repeatedly. A CUDA
// mover may have a few MiB to GiB on their way, and waits for the work that these wait for.
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
