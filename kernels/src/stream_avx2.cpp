// SPDX-License-Identifier: Apache-2.0
#include "stream_loop.hpp"
#include "stream_x86.hpp"

namespace flexkv {
namespace {

struct Avx2Step {
  static void copy_half(char* dst, const char* src) {
    const auto* in = reinterpret_cast<const __m256i*>(src);
    auto* out = reinterpret_cast<__m256i*>(dst);
    const __m256i a = _mm256_loadu_si256(in);
    const __m256i b = _mm256_loadu_si256(in + 1);
    const __m256i c = _mm256_loadu_si256(in + 2);
    const __m256i d = _mm256_loadu_si256(in + 3);
    _mm256_stream_si256(out, a);
    _mm256_stream_si256(out + 1, b);
    _mm256_stream_si256(out + 2, c);
    _mm256_stream_si256(out + 3, d);
  }

  static void copy(char* dst, const char* src) {
    copy_half(dst, src);
    copy_half(dst + kStep / 2, src + kStep / 2);
  }
};

}  // namespace

void stream_avx2(void* dst, const void* src, size_t bytes, const void* next) {
  stream<Avx2Step>(static_cast<char*>(dst), static_cast<const char*>(src), bytes,
                   static_cast<const char*>(next));
}

}  // namespace flexkv
