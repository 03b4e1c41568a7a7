// Stores that bypass the cache: for results that are larger than the cache and are not read again soon. The processor then
// need not load what is overwritten.
#pragma once

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

// Copies; past the cache if `streamed`, and then finish_streams() comes before any other thread reads.
THINWIRE_INLINE void copy_out(float* to, const float* from, size_t n, bool streamed) {
#if defined(__SSE2__)
    if (streamed) {
        size_t i = 0;
        for (; i < n && reinterpret_cast<uintptr_t>(to + i) % 16; ++i) to[i] = from[i];
        for (; i + 4 <= n; i += 4) _mm_stream_ps(to + i, _mm_loadu_ps(from + i));
        for (; i < n; ++i) to[i] = from[i];
        return;
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
