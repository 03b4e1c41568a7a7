// Reductions over floats in an order that is part of the wire format.
#pragma once

#include <algorithm>
#include <vector>

#include "platform.hpp"
#include "x86.hpp"

namespace thinwire {

constexpr size_t kSumBlock = 1024, kSumLanes = 32;

THINWIRE_INLINE int32_t max_magnitude(const float* x, size_t n) {
    int32_t largest = 0;
    for (size_t i = 0; i < n; ++i) largest = std::max(largest, magnitude(x[i]));
    return largest;
}

enum class Term { kMagnitude, kSquare, kNegative, kOther };  // |x|, x^2, x where x < 0, x elsewhere

template <Term term>
THINWIRE_INLINE double term_of(float x) {
    const double wide = x;
    if (term == Term::kNegative) return x < 0 ? wide : 0.0;
    if (term == Term::kOther) return x < 0 ? 0.0 : wide;
    return term == Term::kSquare ? wide * wide : static_cast<double>(float_from_bits(magnitude(x)));
}

// Adds the second half of t[0..size) to its first until one is left; size is a power of two.
THINWIRE_INLINE double halve(double* t, size_t size) {
    for (size_t half = size / 2; half > 0; half /= 2)
        for (size_t i = 0; i < half; ++i) t[i] += t[i + half];
    return t[0];
}

#ifdef THINWIRE_X86
// Adds squares to the lanes; returns how many. They are exact in float64, so fused operations round as separate ones do.
THINWIRE_AVX512 inline size_t add_squares_avx512(const float* x, size_t n, double* lanes) {
    __m512d sums[4] = {_mm512_setzero_pd(), _mm512_setzero_pd(), _mm512_setzero_pd(), _mm512_setzero_pd()};
    size_t i = 0;
    for (; i + kSumLanes <= n; i += kSumLanes)
        for (size_t part = 0; part < 4; ++part) {
            const __m512d wide = _mm512_cvtps_pd(_mm256_loadu_ps(x + i + 8 * part));
            sums[part] = _mm512_fmadd_pd(wide, wide, sums[part]);
        }
    for (size_t part = 0; part < 4; ++part) _mm512_storeu_pd(lanes + 8 * part, sums[part]);
    return i;
}
#endif

// Element i is added to lane i mod 32, in order of i; then the lanes are halved.
template <Term term>
THINWIRE_INLINE double block_sum(const float* x, size_t n) {
    double lanes[kSumLanes] = {};
    size_t i = 0;
#ifdef THINWIRE_X86
    if (term == Term::kSquare && has_avx512()) i = add_squares_avx512(x, n, lanes);
#endif
    for (; i + kSumLanes <= n; i += kSumLanes)
        for (size_t lane = 0; lane < kSumLanes; ++lane) lanes[lane] += term_of<term>(x[i + lane]);
    for (size_t lane = 0; i + lane < n; ++lane) lanes[lane] += term_of<term>(x[i + lane]);
    return halve(lanes, kSumLanes);
}

// Adds up blocks' sums, padded with zeros to a power of two, by halving.
inline double sum_of_blocks(std::vector<double>& sums) {
    size_t padded = 1;
    while (padded < sums.size()) padded *= 2;
    sums.resize(padded, 0.0);
    return halve(sums.data(), padded);
}

// Sum of terms in float64, in blocks of 1024. The order is part of the wire format: a scale must not depend on the
// machine.
template <Term term>
THINWIRE_INLINE double tree_sum(const float* x, size_t n) {
    if (n <= kSumBlock) return block_sum<term>(x, n);
    std::vector<double> sums;
    for (size_t at = 0; at < n; at += kSumBlock) sums.push_back(block_sum<term>(x + at, std::min(kSumBlock, n - at)));
    return sum_of_blocks(sums);
}

}  // namespace thinwire
