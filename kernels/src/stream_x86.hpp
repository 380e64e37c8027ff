// SPDX-License-Identifier: Apache-2.0
//
// Streaming copies for x86-64. Each may only be called where its instructions exist.
#pragma once

#include <cstddef>

namespace flexkv {

void stream_avx2(void* dst, const void* src, std::size_t bytes, const void* next);
void stream_avx512(void* dst, const void* src, std::size_t bytes, const void* next);

}  // namespace flexkv
