// Copies what is kept of an array to the front of another, with its indices: the inner loop of every selection.
//
// Compilers do not vectorise this from a plain loop. AVX2 permutes by a table of the lanes that a mask keeps. AVX-512
// compresses to a register and not to memory, which is slow on Zen 4.
#pragma once

#include "hits.hpp"
#include "x86.hpp"

namespace thinwire {

// What belongs to the k largest: magnitudes above `threshold`, and the first `ties` that equal it.
struct Cut {
    int32_t threshold;
    size_t ties;
};

#ifdef THINWIRE_X86

// Row m lists the set bits of m, in ascending order.
struct SetBits {
    alignas(64) uint8_t rows[256][8];

    constexpr SetBits() : rows() {
        for (int mask = 0; mask < 256; ++mask)
            for (int bit = 0, count = 0; bit < 8; ++bit)
                if (mask >> bit & 1) rows[mask][count++] = static_cast<uint8_t>(bit);
    }
};

inline constexpr SetBits kSetBits;

// The lanes whose bits are set in `mask`, first.
THINWIRE_AVX2_INLINE __m256i lanes_of(uint32_t mask) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(kSetBits.rows[mask])));
}

THINWIRE_AVX2_INLINE size_t popcount(uint32_t mask) { return static_cast<size_t>(__builtin_popcount(mask)); }

THINWIRE_AVX2_INLINE void store8(int32_t* to, __m256i x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), x); }

THINWIRE_AVX2_INLINE __m256i magnitudes8(__m256 x) {
    return _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7fffffff));
}

// Which of eight integers exceed others.
THINWIRE_AVX2_INLINE uint32_t greater8(__m256i a, __m256i b) {
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(a, b))));
}

THINWIRE_AVX2_INLINE void put_values8(uint32_t mask, __m256 x, float* values) {
    _mm256_storeu_ps(values, _mm256_permutevar8x32_ps(x, lanes_of(mask)));
}

// Appends until `count` exceeds `capacity` or fewer than a block are left from `at` on, which moves.
THINWIRE_AVX2 inline size_t compact_avx2(const float* x, size_t n, int32_t threshold, size_t& at, size_t count,
                                         int32_t* indices, float* values, size_t capacity) {
    const __m256i below = _mm256_set1_epi32(threshold - 1);
    for (; at + kBlock <= n && count <= capacity; at += kBlock) {
        __m256i largest = _mm256_setzero_si256();
        for (size_t i = 0; i < kBlock; i += 8)
            largest = _mm256_max_epi32(largest, magnitudes8(_mm256_loadu_ps(x + at + i)));
        if (greater8(largest, below) == 0) continue;
        for (size_t i = at; i < at + kBlock; i += 8) {
            const __m256 value = _mm256_loadu_ps(x + i);
            const uint32_t mask = greater8(magnitudes8(value), below);
            const __m256i lanes = lanes_of(mask);
            _mm256_storeu_ps(values + count, _mm256_permutevar8x32_ps(value, lanes));
            store8(indices + count, _mm256_add_epi32(lanes, _mm256_set1_epi32(static_cast<int32_t>(i))));
            count += popcount(mask);
        }
    }
    return count;
}

// `keep` for whole groups of 8; `at` is where the rest begins. Writes no further than it has read.
THINWIRE_AVX2 inline size_t keep_avx2(const int32_t* from_indices, const float* from_values, size_t count, Cut& cut,
                                      size_t& at, int32_t* indices, float* values, size_t room) {
    const __m256i threshold = _mm256_set1_epi32(cut.threshold);
    size_t kept = 0;
    for (; at + 8 <= count && kept + 8 <= room; at += 8) {
        const __m256 value = _mm256_loadu_ps(from_values + at);
        const __m256i magnitude = magnitudes8(value);
        uint32_t chosen = greater8(magnitude, threshold);
        uint32_t equal = ~(chosen | greater8(threshold, magnitude)) & 255;
        for (; equal && cut.ties; equal &= equal - 1, --cut.ties) chosen |= equal & (0 - equal);
        const __m256i index = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from_indices + at));
        store8(indices + kept, _mm256_permutevar8x32_epi32(index, lanes_of(chosen)));
        put_values8(chosen, value, values + kept);
        kept += popcount(chosen);
    }
    return kept;
}

// For whole groups of 8, of which `at` is the end: counts magnitudes above `high`, and collects the values from `low` on.
THINWIRE_AVX2 inline size_t bracket_avx2(const float* x, size_t n, int32_t low, int32_t high, size_t& at, size_t& above,
                                         float* values, size_t capacity) {
    const __m256i below = _mm256_set1_epi32(low - 1), most = _mm256_set1_epi32(high);
    size_t count = 0;
    for (; at + 8 <= n && count <= capacity; at += 8) {
        const __m256 value = _mm256_loadu_ps(x + at);
        const __m256i magnitude = magnitudes8(value);
        const uint32_t over = greater8(magnitude, most), between = greater8(magnitude, below) & ~over;
        put_values8(between, value, values + count);
        count += popcount(between);
        above += popcount(over);
    }
    return count;
}

// Positions of set bits, for whole bytes, of which `at` is the end; stops where a byte may not fit the room.
THINWIRE_AVX2 inline size_t positions_avx2(const uint8_t* bits, uint64_t num_bits, uint64_t& at, int32_t* positions,
                                           size_t room) {
    size_t found = 0;
    for (; at + 8 <= num_bits && found + 8 <= room; at += 8) {
        const uint32_t mask = bits[at / 8];
        store8(positions + found, _mm256_add_epi32(lanes_of(mask), _mm256_set1_epi32(static_cast<int32_t>(at))));
        found += popcount(mask);
    }
    return found;
}

// Of 16 elements those in `mask` go to `indices` and `values`; returns how many.
THINWIRE_AVX512 inline size_t compress16(__mmask16 mask, __m512i index, __m512 value, int32_t* indices, float* values) {
    _mm512_storeu_si512(indices, _mm512_maskz_compress_epi32(mask, index));
    _mm512_storeu_ps(values, _mm512_maskz_compress_ps(mask, value));
    return static_cast<size_t>(__builtin_popcount(mask));
}

// Appends to `indices` and `values` those of x[at..at + 64) whose magnitude reaches `threshold`; returns how many.
THINWIRE_AVX512 inline size_t compact64_avx512(const float* x, size_t at, int32_t threshold, int32_t* indices,
                                               float* values) {
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff), least = _mm512_set1_epi32(threshold);
    __m512 value[4];
    __mmask16 mask[4];
    for (int i = 0; i < 4; ++i) {
        value[i] = _mm512_loadu_ps(x + at + 16 * i);
        mask[i] = _mm512_cmpge_epi32_mask(_mm512_and_si512(_mm512_castps_si512(value[i]), magnitude), least);
    }
    if ((mask[0] | mask[1] | mask[2] | mask[3]) == 0) return 0;
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    size_t count = 0;
    for (int i = 0; i < 4; ++i) {
        const __m512i index = _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int32_t>(at) + 16 * i));
        count += compress16(mask[i], index, value[i], indices + count, values + count);
    }
    return count;
}

// Appends until `count` exceeds `capacity` or fewer than a block are left from `at` on, which moves.
THINWIRE_AVX512 inline size_t compact_avx512(const float* x, size_t n, int32_t threshold, size_t& at, size_t count,
                                             int32_t* indices, float* values, size_t capacity) {
    for (; at + kBlock <= n && count <= capacity; at += kBlock)
        count += compact64_avx512(x, at, threshold, indices + count, values + count);
    return count;
}

// `keep` for whole groups of 16; `at` is where the rest begins. Writes no further than it has read.
THINWIRE_AVX512 inline size_t keep_avx512(const int32_t* from_indices, const float* from_values, size_t count,
                                          Cut& cut, size_t& at, int32_t* indices, float* values, size_t room) {
    const __m512i bits = _mm512_set1_epi32(0x7fffffff), threshold = _mm512_set1_epi32(cut.threshold);
    size_t kept = 0;
    for (; at + 16 <= count && kept + 16 <= room; at += 16) {
        const __m512 value = _mm512_loadu_ps(from_values + at);
        const __m512i magnitude = _mm512_and_si512(_mm512_castps_si512(value), bits);
        uint32_t above = _mm512_cmpgt_epi32_mask(magnitude, threshold);
        for (uint32_t equal = _mm512_cmpeq_epi32_mask(magnitude, threshold); equal && cut.ties; equal &= equal - 1) {
            above |= equal & (0 - equal);
            --cut.ties;
        }
        kept += compress16(static_cast<__mmask16>(above), _mm512_loadu_si512(from_indices + at), value, indices + kept,
                           values + kept);
    }
    return kept;
}

// For whole groups of 16, of which `at` is the end: counts magnitudes above `high`, and collects the values from `low` on.
THINWIRE_AVX512 inline size_t bracket_avx512(const float* x, size_t n, int32_t low, int32_t high, size_t& at,
                                             size_t& above, float* values, size_t capacity) {
    const __m512i bits = _mm512_set1_epi32(0x7fffffff), least = _mm512_set1_epi32(low), most = _mm512_set1_epi32(high);
    size_t count = 0;
    for (; at + 16 <= n && count <= capacity; at += 16) {
        const __m512 value = _mm512_loadu_ps(x + at);
        const __m512i magnitude = _mm512_and_si512(_mm512_castps_si512(value), bits);
        const __mmask16 over = _mm512_cmpgt_epi32_mask(magnitude, most);
        const __mmask16 between = _mm512_mask_cmpge_epi32_mask(static_cast<__mmask16>(~over), magnitude, least);
        _mm512_storeu_ps(values + count, _mm512_maskz_compress_ps(between, value));
        count += static_cast<size_t>(__builtin_popcount(between));
        above += static_cast<size_t>(__builtin_popcount(over));
    }
    return count;
}

// Positions of set bits, for whole groups of 16, of which `at` is the end; stops where a group may not fit the room.
THINWIRE_AVX512 inline size_t positions_avx512(const uint8_t* bits, uint64_t num_bits, uint64_t& at,
                                               int32_t* positions, size_t room) {
    __m512i index = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    size_t found = 0;
    for (; at + 16 <= num_bits && found + 16 <= room; at += 16, index = _mm512_add_epi32(index, _mm512_set1_epi32(16))) {
        const uint16_t mask = load<uint16_t>(bits + at / 8);
        _mm512_storeu_si512(positions + found, _mm512_maskz_compress_epi32(mask, index));
        found += static_cast<size_t>(__builtin_popcount(mask));
    }
    return found;
}

#endif

// Positions of the set bits among the first `num_bits`; one more than `room` where they do not fit.
inline size_t positions_of_bits(const uint8_t* bits, uint64_t num_bits, int32_t* positions, size_t room) {
    size_t found = 0;
    uint64_t at = 0;
#ifdef THINWIRE_X86
    if (has_avx512() && room > num_bits / 64)  // where fewer are set, most words are passed over at once
        found = positions_avx512(bits, num_bits, at, positions, room);
    else if (has_avx2() && room > num_bits / 32)
        found = positions_avx2(bits, num_bits, at, positions, room);
#endif
    for (; at < num_bits; at += 64) {
        const uint64_t size = num_bits - at < 64 ? num_bits - at : 64;
        uint64_t word = 0;
        std::memcpy(&word, bits + at / 8, (size + 7) / 8);
        if (size < 64) word &= (uint64_t{1} << size) - 1;
        for (; word; word &= word - 1) {
            if (found == room) return room + 1;
            positions[found++] = static_cast<int32_t>(at) + lowest_bit(word);
        }
    }
    return found;
}

}  // namespace thinwire
