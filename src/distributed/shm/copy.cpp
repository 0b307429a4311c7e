#include "distributed/shm/copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

// ThreadSanitizer does not see streaming stores, and the tests want it to.
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)
#include <emmintrin.h>
#define FSDP_STREAMS 1
#endif

namespace fsdp::detail::shm {

void copy_bytes(std::byte* to, const std::byte* from, size_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, bytes);
}

void stream_bytes(std::byte* to, const std::byte* from, size_t bytes) {
#ifdef FSDP_STREAMS
  constexpr size_t kLine = 64, kWorthIt = 1024;
  if (bytes < kWorthIt || to == from) return copy_bytes(to, from, bytes);
  const size_t head = (kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine;
  std::memcpy(to, from, head);
  const size_t lines = (bytes - head) / kLine;
  auto* out = reinterpret_cast<__m128i*>(to + head);
  const auto* in = reinterpret_cast<const __m128i*>(from + head);
  for (size_t i = 0; i < lines; ++i, out += 4, in += 4) {
    const __m128i a = _mm_loadu_si128(in), b = _mm_loadu_si128(in + 1);
    const __m128i c = _mm_loadu_si128(in + 2), d = _mm_loadu_si128(in + 3);
    _mm_stream_si128(out, a);
    _mm_stream_si128(out + 1, b);
    _mm_stream_si128(out + 2, c);
    _mm_stream_si128(out + 3, d);
  }
  const size_t done = head + lines * kLine;
  std::memcpy(to + done, from + done, bytes - done);
  _mm_sfence();
#else
  copy_bytes(to, from, bytes);
#endif
}

}  // namespace fsdp::detail::shm
