// SPDX-License-Identifier: Apache-2.0
//
// A loop over cuMemcpyAsync, one call for each page, as engines' simplest copies have it. Compiled
// when it is measured: in Python the loop would cost more than the calls.
#include <cstddef>
#include <cstdint>

using Copy = int (*)(uint64_t target, uint64_t source, size_t bytes, void* stream);

extern "C" int copy_pages(Copy copy, const uint64_t* targets, const uint64_t* sources, uint64_t n,
                          size_t bytes, void* stream) {
  for (uint64_t i = 0; i < n; ++i) {
    if (int error = copy(targets[i], sources[i], bytes, stream)) return error;
  }
  return 0;
}
