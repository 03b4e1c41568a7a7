// Intrinsics of x86-64, for loops that compilers do not vectorise, and whether this processor has them. Each such loop has a
// plain version beside it; which one runs is decided at run time.
#pragma once

#if defined(__GNUC__) && defined(__x86_64__)
#define THINWIRE_X86 1
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // in a header of GCC 12
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>

#define THINWIRE_AVX2 __attribute__((target("avx2,bmi,bmi2,popcnt")))
#define THINWIRE_AVX512 __attribute__((target("arch=x86-64-v4")))
#define THINWIRE_AVX2_INLINE __attribute__((target("avx2,bmi,bmi2,popcnt"), always_inline)) inline
#define THINWIRE_AVX512_INLINE __attribute__((target("arch=x86-64-v4"), always_inline)) inline

namespace thinwire {

inline bool has_avx2() {
    static const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") &&
                            __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt");
    return has;
}

// All of x86-64-v4: AVX-512 F, BW, CD, DQ and VL.
inline bool has_avx512() {
    static const bool has = has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                            __builtin_cpu_supports("avx512vl");
    return has;
}

// The codes of four times eight elements, each up to 255, as bytes in order.
THINWIRE_AVX2_INLINE __m256i bytes_of(__m256i a, __m256i b, __m256i c, __m256i d) {
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i bytes = _mm256_packus_epi16(_mm256_packus_epi32(a, b), _mm256_packus_epi32(c, d));
    return _mm256_permutevar8x32_epi32(bytes, order);
}

}  // namespace thinwire

#endif
