// Stores that bypass the cache: for results that are larger than the cache and are not read again soon. The processor then
// need not load what is overwritten.
#pragma once

#include <algorithm>

#include "kernels.hpp"
#include "platform.hpp"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace thinwire {

constexpr size_t kMinStreamed = 1 << 20;  // calls with more elements have results that exceed the cache

inline bool is_large(const Outputs& xs) {
    size_t numel = 0;
    for (const Output& x : xs) numel += x.numel;
    return numel > kMinStreamed;
}

#if defined(__SSE2__)
THINWIRE_INLINE void stream_aligned(float* to, const float* from, size_t n) {
    size_t i = 0;
    for (; i + 4 <= n; i += 4) _mm_stream_ps(to + i, _mm_loadu_ps(from + i));
    for (; i < n; ++i) to[i] = from[i];
}
#endif

// Copies; past the cache if `streamed`, and then finish_streams() comes before any other thread reads.
THINWIRE_INLINE void copy_out(float* to, const float* from, size_t n, bool streamed) {
#if defined(__SSE2__)
    const size_t misaligned = reinterpret_cast<uintptr_t>(to) % 16 / sizeof(float);
    if (streamed && misaligned == 0) return stream_aligned(to, from, n);  // unrolled for a constant n
    if (streamed) {
        const size_t head = std::min(n, 4 - misaligned);
        for (size_t i = 0; i < head; ++i) to[i] = from[i];
        return stream_aligned(to + head, from + head, n - head);
    }
#endif
    (void)streamed;
    std::memcpy(to, from, n * sizeof(float));
}

inline void finish_streams() {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

}  // namespace thinwire
