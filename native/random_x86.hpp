// Hashes of eight consecutive positions at a time with AVX2, and of sixteen with AVX-512; the same numbers as random.hpp's.
// Two classes, because a function can be compiled for one instruction set only.
#pragma once

#include "random.hpp"
#include "x86.hpp"

#ifdef THINWIRE_X86

namespace thinwire {

class Hashes8 {
  public:
    THINWIRE_AVX2_INLINE Hashes8(Key key, uint32_t position) : k1_(_mm256_set1_epi32(static_cast<int32_t>(key.k1))) {
        const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        const __m256i apart = _mm256_mullo_epi32(lanes, _mm256_set1_epi32(static_cast<int32_t>(kCounterStep)));
        counter_ = _mm256_add_epi32(_mm256_set1_epi32(static_cast<int32_t>(counter_at(key, position))), apart);
    }

    THINWIRE_AVX2_INLINE __m256i next() {
        __m256i h = counter_;
        h = _mm256_mullo_epi32(_mm256_xor_si256(h, _mm256_srli_epi32(h, 16)), _mm256_set1_epi32(kFirstFactor));
        h = _mm256_xor_si256(_mm256_xor_si256(h, _mm256_srli_epi32(h, 15)), k1_);
        h = _mm256_mullo_epi32(h, _mm256_set1_epi32(static_cast<int32_t>(kSecondFactor)));
        counter_ = _mm256_add_epi32(counter_, _mm256_set1_epi32(static_cast<int32_t>(8 * kCounterStep)));
        return _mm256_xor_si256(h, _mm256_srli_epi32(h, 16));
    }

  private:
    __m256i k1_, counter_;
};

// Multiples of 2^-24 in [0, 1).
THINWIRE_AVX2_INLINE __m256 uniform8(__m256i hashes) {
    return _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_srli_epi32(hashes, 8)), _mm256_set1_ps(0x1p-24f));
}

class Hashes16 {
  public:
    THINWIRE_AVX512_INLINE Hashes16(Key key, uint32_t position) : k1_(_mm512_set1_epi32(static_cast<int32_t>(key.k1))) {
        const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        const __m512i apart = _mm512_mullo_epi32(lanes, _mm512_set1_epi32(static_cast<int32_t>(kCounterStep)));
        counter_ = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int32_t>(counter_at(key, position))), apart);
    }

    THINWIRE_AVX512_INLINE __m512i next() {
        __m512i h = counter_;
        h = _mm512_mullo_epi32(_mm512_xor_si512(h, _mm512_srli_epi32(h, 16)), _mm512_set1_epi32(kFirstFactor));
        h = _mm512_xor_si512(_mm512_xor_si512(h, _mm512_srli_epi32(h, 15)), k1_);
        h = _mm512_mullo_epi32(h, _mm512_set1_epi32(static_cast<int32_t>(kSecondFactor)));
        counter_ = _mm512_add_epi32(counter_, _mm512_set1_epi32(static_cast<int32_t>(16 * kCounterStep)));
        return _mm512_xor_si512(h, _mm512_srli_epi32(h, 16));
    }

  private:
    __m512i k1_, counter_;
};

THINWIRE_AVX512_INLINE __m512 uniform16(__m512i hashes) {
    return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_srli_epi32(hashes, 8)), _mm512_set1_ps(0x1p-24f));
}

}  // namespace thinwire

#endif
