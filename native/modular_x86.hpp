// Moniqua's loops with AVX2 and fused multiply-adds: remainders in float32, as exact as those that the plain loops take in
// float64, if elements lie within kMaxFast turns.
//
// Let a be a float, b the modulus, and r = a - n b for the whole number n that leaves 0 <= r < b. If |a| >= b, r is a
// multiple of b's last place, and so is r +- b, so that a fused multiply-add gives it exactly. If 0 <= a < b, r is a. If
// -b < a < 0, n is -1 and b + a is rounded once, as the plain loops round it; it may be rounded up to b.
#pragma once

#include "random_x86.hpp"

#ifdef THINWIRE_X86

#define THINWIRE_FMA __attribute__((target("avx2,bmi,bmi2,popcnt,fma")))
#define THINWIRE_FMA_INLINE __attribute__((target("avx2,bmi,bmi2,popcnt,fma"), always_inline)) inline

namespace thinwire {

constexpr float kMaxFast = 0x1p20f;  // turns, so that the quotient in float32 is off by one at most

inline bool has_fma() {
    static const bool has = has_avx2() && __builtin_cpu_supports("fma");
    return has;
}

struct Wheel8 {
    __m256 modulus, half, inverse;

    THINWIRE_FMA_INLINE Wheel8(float b, float h) : modulus(_mm256_set1_ps(b)), half(_mm256_set1_ps(h)) {
        inverse = _mm256_div_ps(_mm256_set1_ps(1.0f), modulus);
    }

    // x + half modulo the modulus, less half; and the number of turns taken off.
    THINWIRE_FMA_INLINE __m256 wrapped(__m256 x, __m256& turns) const {
        const __m256 one = _mm256_set1_ps(1.0f), a = _mm256_add_ps(x, half);
        __m256 n = _mm256_floor_ps(_mm256_mul_ps(a, inverse));
        const __m256 rest = _mm256_fnmadd_ps(n, modulus, a);
        const __m256 too_large = _mm256_cmp_ps(rest, _mm256_setzero_ps(), _CMP_LT_OQ);
        const __m256 too_small = _mm256_andnot_ps(_mm256_cmp_ps(n, _mm256_set1_ps(-1.0f), _CMP_EQ_OQ),
                                                  _mm256_cmp_ps(rest, modulus, _CMP_GE_OQ));
        n = _mm256_sub_ps(n, _mm256_and_ps(too_large, one));
        n = _mm256_add_ps(n, _mm256_and_ps(too_small, one));
        turns = n;
        return _mm256_sub_ps(_mm256_fnmadd_ps(n, modulus, a), half);
    }
};

// Sums modulo 2^64 of the products of numbers with odd ones.
struct Weighed8 {
    __m256i even, odd;

    THINWIRE_FMA_INLINE Weighed8() : even(_mm256_setzero_si256()), odd(_mm256_setzero_si256()) {}

    THINWIRE_FMA_INLINE void add(__m256i hash, __m256i numbers) {
        const __m256i weights = _mm256_or_si256(hash, _mm256_set1_epi32(1));
        even = _mm256_add_epi64(even, _mm256_mul_epi32(weights, numbers));
        odd = _mm256_add_epi64(odd, _mm256_mul_epi32(_mm256_srli_epi64(weights, 32), _mm256_srli_epi64(numbers, 32)));
    }

    THINWIRE_FMA_INLINE uint64_t sum() const {
        alignas(32) uint64_t lanes[4];
        _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), _mm256_add_epi64(even, odd));
        return lanes[0] + lanes[1] + lanes[2] + lanes[3];
    }
};

THINWIRE_FMA_INLINE int32_t sum_of_lanes(__m256i numbers) {
    alignas(32) int32_t lanes[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), numbers);
    int32_t sum = 0;
    for (int32_t lane : lanes) sum += lane;
    return sum;
}

THINWIRE_FMA_INLINE __m256i bytes8(const uint8_t* codes) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
}

struct Encoder8 {
    Wheel8 wheel;
    __m256 inverse, last;
    __m256i last_code;

    // Eight codes; adds what the check counts: turns times the levels of a turn, and codes.
    THINWIRE_FMA_INLINE __m256i encode(const float* x, Hashes8& hashes, Weighed8& check) const {
        __m256 turns;
        const __m256 y = wheel.wrapped(_mm256_loadu_ps(x), turns);
        const __m256i hash = hashes.next();
        const __m256 t = _mm256_mul_ps(_mm256_add_ps(_mm256_mul_ps(y, inverse), last), _mm256_set1_ps(0.5f));
        const __m256 bounded = _mm256_min_ps(_mm256_max_ps(_mm256_add_ps(t, uniform8(hash)), _mm256_setzero_ps()), last);
        const __m256i code = _mm256_cvttps_epi32(bounded);
        check.add(hash, _mm256_add_epi32(_mm256_mullo_epi32(_mm256_cvtps_epi32(turns), last_code), code));
        return code;
    }
};

// Codes of the elements up to a multiple of 32, whose number is returned.
THINWIRE_FMA inline size_t encode_fast(const float* x, size_t n, float modulus, float half, float inverse, int32_t last,
                                       Key key, uint32_t position, uint8_t* codes, uint64_t* check) {
    const float steps = static_cast<float>(last);
    const Encoder8 encoder{{modulus, half}, _mm256_set1_ps(inverse), _mm256_set1_ps(steps), _mm256_set1_epi32(last)};
    Hashes8 hashes(key, position);
    Weighed8 sums;
    size_t i = 0;
    for (; i + 32 <= n; i += 32) {
        const __m256i a = encoder.encode(x + i, hashes, sums), b = encoder.encode(x + i + 8, hashes, sums);
        const __m256i c = encoder.encode(x + i + 16, hashes, sums), d = encoder.encode(x + i + 24, hashes, sums);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + i), bytes_of(a, b, c, d));
    }
    *check += sums.sum();
    return i;
}

// The sums of the crossings up to a multiple of 8 elements, whose number is returned; n is at most a chunk.
THINWIRE_FMA inline size_t sum_fast(const uint8_t* own, const uint8_t* theirs, size_t n, int32_t last, Key key,
                                    uint32_t position, uint64_t* sums) {
    const __m256i turn = _mm256_set1_epi32(last), half = _mm256_set1_epi32((last - 1) / 2);
    const __m256i below = _mm256_sub_epi32(_mm256_setzero_si256(), half);
    Hashes8 hashes(key, position);
    Weighed8 check;
    __m256i size = _mm256_setzero_si256(), square = size;
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256i k = _mm256_sub_epi32(bytes8(theirs + i), bytes8(own + i));
        const __m256i above = _mm256_cmpgt_epi32(k, half), beneath = _mm256_cmpgt_epi32(below, k);
        k = _mm256_sub_epi32(k, _mm256_and_si256(above, turn));
        k = _mm256_add_epi32(k, _mm256_and_si256(beneath, turn));
        check.add(hashes.next(), k);
        const __m256i magnitude = _mm256_abs_epi32(k);
        size = _mm256_add_epi32(size, magnitude);
        square = _mm256_add_epi32(square, _mm256_madd_epi16(magnitude, magnitude));
    }
    sums[0] += check.sum(), sums[1] += static_cast<uint64_t>(sum_of_lanes(size));
    sums[2] += static_cast<uint64_t>(sum_of_lanes(square));
    return i;
}

THINWIRE_FMA_INLINE __m256 level8(const uint8_t* codes, __m256i last, float step) {
    const __m256i code = bytes8(codes);
    const __m256i twice = _mm256_sub_epi32(_mm256_add_epi32(code, code), last);
    return _mm256_mul_ps(_mm256_cvtepi32_ps(twice), _mm256_set1_ps(step));
}

struct Recovering {
    float modulus, half, own_step, their_step, weight;
};

// Adds the changes of the elements up to a multiple of 8, whose number is returned.
THINWIRE_FMA inline size_t recover_fast(const float* x, const uint8_t* own, const uint8_t* theirs, size_t n, int32_t last,
                                        const Recovering* r, float* change) {
    const Wheel8 wheel(r->modulus, r->half);
    const __m256i steps = _mm256_set1_epi32(last);
    const __m256 weight = _mm256_set1_ps(r->weight);
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256 turns;
        const __m256 at = _mm256_loadu_ps(x + i);
        const __m256 error = _mm256_sub_ps(level8(own + i, steps, r->own_step), wheel.wrapped(at, turns));
        const __m256 difference = wheel.wrapped(_mm256_sub_ps(level8(theirs + i, steps, r->their_step), at), turns);
        const __m256 added = _mm256_mul_ps(_mm256_sub_ps(difference, error), weight);
        _mm256_storeu_ps(change + i, _mm256_add_ps(_mm256_loadu_ps(change + i), added));
    }
    return i;
}

}  // namespace thinwire

#endif
