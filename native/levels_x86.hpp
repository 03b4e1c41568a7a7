// Lookups of levels that compilers do not vectorise. Up to 16 levels fit into registers, where a permutation looks up all
// lanes at once. More levels are found by their cell, with one load for each element.
#pragma once

#include "levels.hpp"
#include "random_x86.hpp"

#ifdef THINWIRE_X86

namespace thinwire {

// The levels around eight numbers, and the codes of the lower ones.
struct Around8 {
    __m256 low, high;
    __m256i code;
};

// Eight or sixteen levels in one or two registers.
template <int size>
struct Registers8 {
    __m256 first, second;

    THINWIRE_AVX2_INLINE explicit Registers8(const float* values)
        : first(_mm256_loadu_ps(values)), second(size > 8 ? _mm256_loadu_ps(values + 8) : first) {}

    THINWIRE_AVX2_INLINE __m256 at(__m256i code) const {
        const __m256 below = _mm256_permutevar8x32_ps(first, code);
        if (size <= 8) return below;
        const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(code, 28));  // the sign: code >= 8
        return _mm256_blendv_ps(below, _mm256_permutevar8x32_ps(second, code), upper);
    }
};

// Each step of the search halves the levels: the first compares with one, the second with one of two, and so on.
template <int size>
struct FewLevels8 {
    Registers8<size> value, next;
    __m256 of_one, of_two[2], of_four, of_eight;  // thresholds of the steps that have so many

    THINWIRE_AVX2_INLINE explicit FewLevels8(const Table& table) : value(table.value), next(table.value + 1) {
        const float* t = table.threshold;
        constexpr int step = size / 2;
        of_one = _mm256_set1_ps(t[step]);
        of_two[0] = _mm256_set1_ps(t[step / 2]), of_two[1] = _mm256_set1_ps(t[step / 2 * 3]);
        of_four = _mm256_set_ps(t[step / 4 * 7], t[step / 4 * 5], t[step / 4 * 3], t[step / 4], t[step / 4 * 7],
                                t[step / 4 * 5], t[step / 4 * 3], t[step / 4]);
        of_eight = _mm256_setr_ps(t[1], t[3], t[5], t[7], t[9], t[11], t[13], t[15]);
    }

    THINWIRE_AVX2_INLINE Around8 around(__m256 r) const {
        __m256 reached = _mm256_cmp_ps(r, of_one, _CMP_GE_OQ);
        __m256i code = _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_castps_si256(reached));
        if (size >= 4) code = twice_and(code, r, _mm256_blendv_ps(of_two[0], of_two[1], reached));
        if (size >= 8) code = twice_and(code, r, _mm256_permutevar_ps(of_four, code));
        if (size >= 16) code = twice_and(code, r, _mm256_permutevar8x32_ps(of_eight, code));
        return {value.at(code), next.at(code), code};
    }

    // 2 code + (r >= threshold)
    THINWIRE_AVX2_INLINE static __m256i twice_and(__m256i code, __m256 r, __m256 threshold) {
        const __m256 reached = _mm256_cmp_ps(r, threshold, _CMP_GE_OQ);
        return _mm256_sub_epi32(_mm256_add_epi32(code, code), _mm256_castps_si256(reached));
    }
};

struct ManyLevels8 {
    const Cell* cells;
    __m128i shift;
    __m256i first, last, per_sign;

    THINWIRE_AVX2_INLINE explicit ManyLevels8(const Table& table)
        : cells(table.cells.cells.data()),
          shift(_mm_cvtsi32_si128(table.cells.shift)),
          first(_mm256_set1_epi32(table.cells.first)),
          last(_mm256_set1_epi32(table.cells.per_sign - 1)),
          per_sign(_mm256_set1_epi32(table.cells.per_sign)) {}

    // Cells i and i + 4, side by side.
    THINWIRE_AVX2_INLINE __m256 pair(const uint32_t* cell, int i) const {
        const __m128 low = _mm_load_ps(&cells[cell[i]].low), high = _mm_load_ps(&cells[cell[i + 4]].low);
        return _mm256_insertf128_ps(_mm256_castps128_ps256(low), high, 1);
    }

    THINWIRE_AVX2_INLINE Around8 around(__m256 r) const {
        const __m256i bits = _mm256_castps_si256(r), magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
        const __m256i above = _mm256_sub_epi32(_mm256_srl_epi32(magnitude, shift), first);
        const __m256i cell = _mm256_min_epi32(_mm256_max_epi32(above, _mm256_setzero_si256()), last);
        const __m256i negative = _mm256_and_si256(_mm256_srai_epi32(bits, 31), per_sign);
        alignas(32) uint32_t found[8];
        _mm256_store_si256(reinterpret_cast<__m256i*>(found), _mm256_add_epi32(cell, negative));
        const __m256 a = pair(found, 0), b = pair(found, 1), c = pair(found, 2), d = pair(found, 3);
        const __m256 ab = _mm256_unpacklo_ps(a, b), cd = _mm256_unpacklo_ps(c, d);
        const __m256 ab2 = _mm256_unpackhi_ps(a, b), cd2 = _mm256_unpackhi_ps(c, d);
        const __m256 low = _mm256_shuffle_ps(ab, cd, 0x44), middle = _mm256_shuffle_ps(ab, cd, 0xee);
        const __m256 high = _mm256_shuffle_ps(ab2, cd2, 0x44), code = _mm256_shuffle_ps(ab2, cd2, 0xee);
        const __m256 reached = _mm256_cmp_ps(r, middle, _CMP_GE_OQ);
        return {_mm256_blendv_ps(low, middle, reached), _mm256_blendv_ps(middle, high, reached),
                _mm256_sub_epi32(_mm256_castps_si256(code), _mm256_castps_si256(reached))};
    }
};

// Chooses between the levels around eight elements; returns the codes.
template <bool with_residual, typename Rule>
THINWIRE_AVX2_INLINE __m256i encode8(const Rule& rule, const Elements& part, size_t i, float* residual) {
    const __m256 x = _mm256_loadu_ps(part.x + i), r = _mm256_mul_ps(x, _mm256_set1_ps(part.inv));
    const Around8 around = rule.around(r);
    const __m256 reach = _mm256_mul_ps(_mm256_loadu_ps(part.u + i), _mm256_sub_ps(around.high, around.low));
    const __m256 up = _mm256_cmp_ps(_mm256_sub_ps(r, around.low), reach, _CMP_GT_OQ);
    if (with_residual) {
        const __m256 sent = _mm256_mul_ps(_mm256_blendv_ps(around.low, around.high, up), _mm256_set1_ps(part.scale));
        _mm256_storeu_ps(residual + i, _mm256_sub_ps(x, sent));
    }
    return _mm256_sub_epi32(around.code, _mm256_castps_si256(up));
}

template <bool with_residual, typename Rule>
THINWIRE_AVX2_INLINE void encode_by(const Table& table, const Elements& part, uint8_t* codes, float* residual) {
    const Rule rule(table);
    size_t i = 0;
    for (; i + 32 <= part.n; i += 32) {
        const __m256i a = encode8<with_residual>(rule, part, i, residual);
        const __m256i b = encode8<with_residual>(rule, part, i + 8, residual);
        const __m256i c = encode8<with_residual>(rule, part, i + 16, residual);
        const __m256i d = encode8<with_residual>(rule, part, i + 24, residual);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + i), bytes_of(a, b, c, d));
    }
    encode_plainly(table, part.from(i), codes + i, with_residual ? residual + i : nullptr);
}

template <bool with_residual>
THINWIRE_AVX2 void encode_avx2(const Table& table, const Elements& part, uint8_t* codes, float* residual) {
    if (!table.few()) return encode_by<with_residual, ManyLevels8>(table, part, codes, residual);
    switch (table.size) {
        case 2: return encode_by<with_residual, FewLevels8<2>>(table, part, codes, residual);
        case 4: return encode_by<with_residual, FewLevels8<4>>(table, part, codes, residual);
        case 8: return encode_by<with_residual, FewLevels8<8>>(table, part, codes, residual);
        default: return encode_by<with_residual, FewLevels8<16>>(table, part, codes, residual);
    }
}

template <int size>
THINWIRE_AVX2_INLINE void decode_few_by(const Table& table, const uint8_t* codes, size_t n, float step, float* out) {
    const Registers8<size> value(table.value);
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const __m256i code = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i)));
        const __m256 added = _mm256_mul_ps(value.at(code), _mm256_set1_ps(step));
        _mm256_storeu_ps(out + i, _mm256_add_ps(_mm256_loadu_ps(out + i), added));
    }
    decode_plainly(table, codes + i, n - i, step, out + i);
}

// A load for each level is faster than a gather.
THINWIRE_AVX2_INLINE void decode_many_avx2(const Table& table, const uint8_t* codes, size_t n, float step, float* out) {
    const float* v = table.value;
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const uint64_t c = load<uint64_t>(codes + i);
        const __m256 level = _mm256_setr_ps(v[c & 255], v[c >> 8 & 255], v[c >> 16 & 255], v[c >> 24 & 255],
                                            v[c >> 32 & 255], v[c >> 40 & 255], v[c >> 48 & 255], v[c >> 56]);
        const __m256 added = _mm256_mul_ps(level, _mm256_set1_ps(step));
        _mm256_storeu_ps(out + i, _mm256_add_ps(_mm256_loadu_ps(out + i), added));
    }
    decode_plainly(table, codes + i, n - i, step, out + i);
}

THINWIRE_AVX2 inline void decode_avx2(const Table& table, const uint8_t* codes, size_t n, float step, float* out) {
    if (!table.few()) return decode_many_avx2(table, codes, n, step, out);
    if (table.size <= 8) return decode_few_by<8>(table, codes, n, step, out);
    decode_few_by<16>(table, codes, n, step, out);
}

// With AVX-512, sixteen levels fit into one register, and are searched by halving.
template <int size, bool with_residual>
THINWIRE_AVX512_INLINE size_t encode_few16(const Table& table, const Drawn& part, uint8_t* codes, float* residual) {
    const __m512 value = _mm512_loadu_ps(table.value), next = _mm512_loadu_ps(table.value + 1);
    const __m512 width = _mm512_sub_ps(next, value), sent = _mm512_mul_ps(value, _mm512_set1_ps(part.scale));
    Hashes16 hashes(part.key, part.position);
    size_t i = 0;
    for (; i + 16 <= part.n; i += 16) {
        const __m512 x = _mm512_loadu_ps(part.x + i), r = _mm512_mul_ps(x, _mm512_set1_ps(part.inv));
        __m512i code = _mm512_setzero_si512();
        for (int step = size / 2; step > 0; step /= 2) {
            const __m512 at = step == size / 2 ? _mm512_set1_ps(table.threshold[step])
                                               : _mm512_permutexvar_ps(code, _mm512_loadu_ps(table.threshold + step));
            code = _mm512_mask_add_epi32(code, _mm512_cmp_ps_mask(r, at, _CMP_GE_OQ), code, _mm512_set1_epi32(step));
        }
        const __m512 reach = _mm512_mul_ps(uniform16(hashes.next()), _mm512_permutexvar_ps(code, width));
        const __m512 above = _mm512_sub_ps(r, _mm512_permutexvar_ps(code, value));
        const __mmask16 up = _mm512_cmp_ps_mask(above, reach, _CMP_GT_OQ);
        code = _mm512_mask_add_epi32(code, up, code, _mm512_set1_epi32(1));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + i), _mm512_cvtepi32_epi8(code));
        if (with_residual) _mm512_storeu_ps(residual + i, _mm512_sub_ps(x, _mm512_permutexvar_ps(code, sent)));
    }
    return i;
}

template <bool with_residual>
THINWIRE_AVX512 size_t encode_few_avx512(const Table& table, const Drawn& part, uint8_t* codes, float* residual) {
    switch (table.size) {
        case 2: return encode_few16<2, with_residual>(table, part, codes, residual);
        case 4: return encode_few16<4, with_residual>(table, part, codes, residual);
        case 8: return encode_few16<8, with_residual>(table, part, codes, residual);
        default: return encode_few16<16, with_residual>(table, part, codes, residual);
    }
}

THINWIRE_AVX512 inline void decode_few_avx512(const Table& table, const uint8_t* codes, size_t n, float step,
                                              float* out) {
    const __m512 value = _mm512_loadu_ps(table.value);
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        const __m128i code = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i));
        const __m512 level = _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(code), value);
        const __m512 sum = _mm512_add_ps(_mm512_loadu_ps(out + i), _mm512_mul_ps(level, _mm512_set1_ps(step)));
        _mm512_storeu_ps(out + i, sum);
    }
    decode_plainly(table, codes + i, n - i, step, out + i);
}

}  // namespace thinwire

#endif
