// SPDX-License-Identifier: Apache-2.0
#include "stream_loop.hpp"
#include "stream_x86.hpp"

namespace flexkv {
namespace {

struct Avx512Step {
  static void copy(char* dst, const char* src) {
    const auto* in = reinterpret_cast<const __m512i*>(src);
    auto* out = reinterpret_cast<__m512i*>(dst);
    const __m512i a = _mm512_loadu_si512(in);
    const __m512i b = _mm512_loadu_si512(in + 1);
    const __m512i c = _mm512_loadu_si512(in + 2);
    const __m512i d = _mm512_loadu_si512(in + 3);
    _mm512_stream_si512(out, a);
    _mm512_stream_si512(out + 1, b);
    _mm512_stream_si512(out + 2, c);
    _mm512_stream_si512(out + 3, d);
  }
};

}  // namespace

void stream_avx512(void* dst, const void* src, size_t bytes, const void* next) {
  stream<Avx512Step>(static_cast<char*>(dst), static_cast<const char*>(src), bytes,
                     static_cast<const char*>(next));
}

}  // namespace flexkv
