// Evenly spaced levels with AVX2: codes of eight elements at a time, and how well they fit.
#pragma once

#include "random_x86.hpp"

#ifdef THINWIRE_X86

namespace thinwire {

// For elements r in steps of half a level and their codes k = 2 code - last: the sums of k k, r k and r r.
struct Fit {
    double kk = 0, rk = 0, rr = 0;
};

struct UniformBucket {
    Key key;
    uint32_t position;  // of the first element
    float inv, step;
    int last;
    const float* next[2] = {};  // what is needed soon, as many elements
};

template <bool with_residual, bool measured>
struct UniformEncoder8 {
    Hashes8 hashes;
    __m256i last;
    __m256 inv, step, steps;
    __m256 rk, rr;
    __m256i kk;

    THINWIRE_AVX2_INLINE explicit UniformEncoder8(const UniformBucket& b)
        : hashes(b.key, b.position),
          last(_mm256_set1_epi32(b.last)),
          inv(_mm256_set1_ps(b.inv)),
          step(_mm256_set1_ps(b.step)),
          steps(_mm256_set1_ps(static_cast<float>(b.last))),
          rk(_mm256_setzero_ps()),
          rr(_mm256_setzero_ps()),
          kk(_mm256_setzero_si256()) {}

    THINWIRE_AVX2_INLINE __m256i encode(const float* from, float* residual) {
        const __m256 x = _mm256_loadu_ps(from), r = _mm256_mul_ps(x, inv);
        const __m256 t = _mm256_mul_ps(_mm256_add_ps(r, steps), _mm256_set1_ps(0.5f));
        const __m256i code = _mm256_min_epi32(_mm256_cvttps_epi32(_mm256_add_ps(t, uniform8(hashes.next()))), last);
        if (with_residual || measured) {
            const __m256i twice = _mm256_sub_epi32(_mm256_add_epi32(code, code), last);
            const __m256 k = _mm256_cvtepi32_ps(twice);
            if (with_residual) _mm256_storeu_ps(residual, _mm256_sub_ps(x, _mm256_mul_ps(k, step)));
            if (measured) {
                rk = _mm256_add_ps(rk, _mm256_mul_ps(r, k));
                rr = _mm256_add_ps(rr, _mm256_mul_ps(r, r));
                const __m256i magnitude = _mm256_abs_epi32(twice);
                kk = _mm256_add_epi32(kk, _mm256_madd_epi16(magnitude, magnitude));
            }
        }
        return code;
    }
};

THINWIRE_AVX2_INLINE double sum8(__m256 x) {
    alignas(32) float lanes[8];
    _mm256_store_ps(lanes, x);
    double sum = 0;
    for (float lane : lanes) sum += static_cast<double>(lane);
    return sum;
}

// Codes of up to 8 bits of the elements up to a multiple of 32, whose number is returned. n is at most a chunk.
template <bool with_residual, bool measured>
THINWIRE_AVX2 size_t encode_uniform(const float* x, size_t n, const UniformBucket* bucket, uint8_t* codes, float* residual,
                                    Fit* fit) {
    UniformEncoder8<with_residual, measured> encoder(*bucket);
    size_t i = 0;
    for (; i + 32 <= n; i += 32) {
        if (measured) prefetch(bucket->next[0] + i, 32), prefetch(bucket->next[1] + i, 32);
        float* rest = with_residual ? residual + i : nullptr;
        const __m256i a = encoder.encode(x + i, rest), b = encoder.encode(x + i + 8, with_residual ? rest + 8 : nullptr);
        const __m256i c = encoder.encode(x + i + 16, with_residual ? rest + 16 : nullptr);
        const __m256i d = encoder.encode(x + i + 24, with_residual ? rest + 24 : nullptr);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + i), bytes_of(a, b, c, d));
    }
    if (measured) {
        fit->rk += sum8(encoder.rk), fit->rr += sum8(encoder.rr);
        alignas(32) int32_t lanes[8];
        _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), encoder.kk);
        for (int32_t lane : lanes) fit->kk += static_cast<double>(lane);
    }
    return i;
}

}  // namespace thinwire

#endif
