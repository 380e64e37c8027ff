// SPDX-License-Identifier: Apache-2.0
//
// The loop of the streaming copies. libc's memcpy bypasses the caches only above a size that KV pages
// never reach: below it every line of the destination is first read from memory, and the copy pushes
// out what the engine keeps in the caches. This loop writes whole lines past the caches at any size,
// and fetches ahead in the order of the pages, which the processor cannot guess.
//
// Included by one file per instruction set, each compiled for that set. Everything here has internal
// linkage and uses no inline function of the standard library: the linker might otherwise keep the
// copy with the newer instructions for all callers.
#pragma once

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

namespace flexkv {
namespace {

constexpr size_t kLine = 64;
constexpr size_t kStep = 4 * kLine;

// How far ahead of the copy its source is fetched. Tuned on a Zen 5 server core (one of two in a
// virtual machine, 4 KiB memory pages), stores of 512 MiB in pages of 8 to 64 KiB in random order,
// one thread: none 0.67-0.99 of one large memcpy, 4 KiB 0.84-1.15, 8 KiB 0.94-1.17, 16 KiB 0.94-1.17.
// The least of the best, because it must fit the 32 KiB first-level caches of other processors.
constexpr size_t kAhead = 8192;

void fetch_step(uintptr_t address) {
  for (size_t line = 0; line < kStep; line += kLine) {
    _mm_prefetch(reinterpret_cast<const char*>(address + line), _MM_HINT_T0);
  }
}

// Copies up to the first line boundary of dst: a line written partly past the caches costs a read and
// a write of memory. Returns how many bytes that took.
size_t align_head(char* dst, const char* src) {
  const size_t head = (kLine - reinterpret_cast<uintptr_t>(dst) % kLine) % kLine;
  memcpy(dst, src, head);
  return head;
}

// Step::copy copies kStep bytes from anywhere to a line boundary, past the caches.
template <typename Step>
void copy_steps(char* dst, const char* src, size_t bytes) {
  for (size_t done = 0; done < bytes; done += kStep) {
    Step::copy(dst + done, src + done);
  }
}

template <typename Step>
void copy_steps_fetching(char* dst, const char* src, size_t bytes, uintptr_t ahead) {
  for (size_t done = 0; done < bytes; done += kStep) {
    fetch_step(ahead + done);
    Step::copy(dst + done, src + done);
  }
}

template <typename Step>
void stream(char* dst, const char* src, size_t bytes, const char* next) {
  const bool source_goes_on = next == nullptr || next == src + bytes;
  if (bytes >= 2 * kStep) {
    const size_t head = align_head(dst, src);
    const size_t steps = (bytes - head) / kStep * kStep;
    dst += head;
    src += head;
    bytes -= head + steps;
    if (source_goes_on) {  // the processor's own prefetchers see that
      copy_steps<Step>(dst, src, steps);
    } else {
      const size_t last = steps < kAhead ? steps : kAhead;
      const size_t first = steps - last;
      copy_steps_fetching<Step>(dst, src, first, reinterpret_cast<uintptr_t>(src) + kAhead);
      copy_steps_fetching<Step>(dst + first, src + first, last, reinterpret_cast<uintptr_t>(next));
    }
    dst += steps;
    src += steps;
  }
  memcpy(dst, src, bytes);
}

}  // namespace
}  // namespace flexkv
