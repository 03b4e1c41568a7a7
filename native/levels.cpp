// Stochastic quantization to any sorted set of levels in [-1, 1], times the bucket's scale.
#include "buckets.hpp"

#if defined(THINWIRE_TARGET_CLONES)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // in a header of GCC 12
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#endif

namespace thinwire {

namespace {

constexpr int kMaxLevels = 256, kFewLevels = 16;

struct Table {
    int size;                     // number of levels, rounded up to a power of two
    float value[kMaxLevels + 1];  // padded with the last level
    float threshold[kMaxLevels];  // element j is level j for 1 <= j <= num_levels - 2; all others are infinite

    Table(const std::vector<float>& levels, const Buckets& buckets) {
        const int num_levels = static_cast<int>(levels.size()), last = num_levels - 1;
        require(num_levels >= 2 && num_levels <= kMaxLevels, "levels: expected 2 to 256");
        require(buckets.bits <= 8 && num_levels <= 1 << buckets.bits, "bits: expected 1 to 8, enough for the levels");
        size = 1 << buckets.bits;
        for (int j = 0; j <= kMaxLevels; ++j) value[j] = levels[std::min(j, last)];
        for (int j = 0; j < kMaxLevels; ++j)
            threshold[j] = j >= 1 && j < last ? value[j] : std::numeric_limits<float>::infinity();
    }
};

// A part of one bucket, in chunks: `u` has its random numbers, `inv` is the inverse of the scale.
struct Part {
    const float *x, *u;
    size_t n;
    float scale, inv;
};

// Codes and residuals (null for none). The code of the level below r is the number of inner levels that are at most r.
// An element takes the level above if u * width is less than its distance from the level below; so an element at a level
// keeps its value.
template <bool few>
THINWIRE_INLINE void encode_plainly(const Table& table, Part part, uint8_t* codes, float* residual) {
    THINWIRE_INDEPENDENT
    for (size_t i = 0; i < part.n; ++i) {
        const float x = part.x[i], r = x * part.inv;
        int32_t code = 0;
        if (few)
            for (int j = 1; j < kFewLevels - 1; ++j) code += r >= table.threshold[j];
        else
            for (int step = kMaxLevels / 2; step > 0; step /= 2)
                code += step & -static_cast<int32_t>(r >= table.threshold[code + step]);
        const float low = table.value[code], width = table.value[code + 1] - low;
        code += r - low > part.u[i] * width;
        codes[i] = static_cast<uint8_t>(code);
        if (residual) residual[i] = x - table.value[code] * part.scale;
    }
}

THINWIRE_INLINE void decode_plainly(const Table& table, const uint8_t* codes, size_t n, float step, float* out) {
    THINWIRE_INDEPENDENT
    for (size_t i = 0; i < n; ++i) out[i] += table.value[codes[i]] * step;
}

THINWIRE_CLONES void decode_many(const Table* table, const uint8_t* codes, size_t n, float step, float* out) {
    decode_plainly(*table, codes, n, step, out);
}

#if defined(THINWIRE_TARGET_CLONES)

// Takes the level above if u * width is less than the distance from the level below; stores codes and residuals of 16
// elements.
__attribute__((target("arch=x86-64-v4"))) inline void store_codes(const Part& part, size_t i, __m512 x, __m512 r,
                                                                  __m512i code, __m512 low, __m512 high,
                                                                  uint8_t* codes, float* residual) {
    const __m512 reach = _mm512_mul_ps(_mm512_loadu_ps(part.u + i), _mm512_sub_ps(high, low));
    const __mmask16 up = _mm512_cmp_ps_mask(_mm512_sub_ps(r, low), reach, _CMP_GT_OQ);
    const __m512i chosen = _mm512_mask_add_epi32(code, up, code, _mm512_set1_epi32(1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + i), _mm512_cvtepi32_epi8(chosen));
    const __m512 sent = _mm512_mul_ps(_mm512_mask_mov_ps(low, up, high), _mm512_set1_ps(part.scale));
    if (residual) _mm512_storeu_ps(residual + i, _mm512_sub_ps(x, sent));
}

// Sixteen levels fit into a vector register, where one permutation looks up sixteen elements. Compilers do not find this;
// comparing with every level takes four times as long.
template <int size>
__attribute__((target("arch=x86-64-v4"))) void encode_by_lookup(const Table* table, Part part, uint8_t* codes,
                                                                float* residual) {
    const __m512 value = _mm512_loadu_ps(table->value), next = _mm512_loadu_ps(table->value + 1);
    const __m512 threshold = _mm512_loadu_ps(table->threshold);
    const size_t whole = part.n / 16 * 16;
    for (size_t i = 0; i < whole; i += 16) {
        const __m512 x = _mm512_loadu_ps(part.x + i), r = _mm512_mul_ps(x, _mm512_set1_ps(part.inv));
        __m512i code = _mm512_setzero_si512();
        for (int step = size / 2; step > 0; step /= 2) {
            const __m512i middle = _mm512_or_si512(code, _mm512_set1_epi32(step));
            const __m512 at = _mm512_permutexvar_ps(middle, threshold);
            code = _mm512_mask_mov_epi32(code, _mm512_cmp_ps_mask(r, at, _CMP_GE_OQ), middle);
        }
        const __m512 low = _mm512_permutexvar_ps(code, value), high = _mm512_permutexvar_ps(code, next);
        store_codes(part, i, x, r, code, low, high, codes, residual);
    }
    const Part rest{part.x + whole, part.u + whole, part.n - whole, part.scale, part.inv};
    encode_plainly<true>(*table, rest, codes + whole, residual ? residual + whole : nullptr);
}

__attribute__((target("arch=x86-64-v4"))) void encode_few(const Table* table, Part part, uint8_t* codes,
                                                          float* residual) {
    switch (table->size) {
        case 2: return encode_by_lookup<2>(table, part, codes, residual);
        case 4: return encode_by_lookup<4>(table, part, codes, residual);
        case 8: return encode_by_lookup<8>(table, part, codes, residual);
        default: return encode_by_lookup<16>(table, part, codes, residual);
    }
}

// More levels: the first four search steps use every (size / 16)-th threshold, in a register; the others use memory.
__attribute__((target("arch=x86-64-v4"))) void encode_many(const Table* table, Part part, uint8_t* codes,
                                                           float* residual) {
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const int stride = table->size / 16;
    const __m512 coarse = _mm512_i32gather_ps(_mm512_mullo_epi32(lanes, _mm512_set1_epi32(stride)), table->threshold, 4);
    const size_t whole = part.n / 16 * 16;
    for (size_t i = 0; i < whole; i += 16) {
        const __m512 x = _mm512_loadu_ps(part.x + i), r = _mm512_mul_ps(x, _mm512_set1_ps(part.inv));
        __m512i code = _mm512_setzero_si512();
        for (int step = 8; step > 0; step /= 2) {
            const __m512i middle = _mm512_or_si512(code, _mm512_set1_epi32(step));
            const __m512 at = _mm512_permutexvar_ps(middle, coarse);
            code = _mm512_mask_mov_epi32(code, _mm512_cmp_ps_mask(r, at, _CMP_GE_OQ), middle);
        }
        code = _mm512_mullo_epi32(code, _mm512_set1_epi32(stride));
        for (int step = stride / 2; step > 0; step /= 2) {
            const __m512i middle = _mm512_or_si512(code, _mm512_set1_epi32(step));
            const __m512 at = _mm512_i32gather_ps(middle, table->threshold, 4);
            code = _mm512_mask_mov_epi32(code, _mm512_cmp_ps_mask(r, at, _CMP_GE_OQ), middle);
        }
        const __m512 low = _mm512_i32gather_ps(code, table->value, 4);
        const __m512 high = _mm512_i32gather_ps(code, table->value + 1, 4);
        store_codes(part, i, x, r, code, low, high, codes, residual);
    }
    const Part rest{part.x + whole, part.u + whole, part.n - whole, part.scale, part.inv};
    encode_plainly<false>(*table, rest, codes + whole, residual ? residual + whole : nullptr);
}

__attribute__((target("arch=x86-64-v4"))) void decode_few(const Table* table, const uint8_t* codes, size_t n,
                                                          float step, float* out) {
    const __m512 value = _mm512_loadu_ps(table->value);
    const size_t whole = n / 16 * 16;
    for (size_t i = 0; i < whole; i += 16) {
        const __m128i code = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i));
        const __m512 level = _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(code), value);
        const __m512 sum = _mm512_add_ps(_mm512_loadu_ps(out + i), _mm512_mul_ps(level, _mm512_set1_ps(step)));
        _mm512_storeu_ps(out + i, sum);
    }
    decode_plainly(*table, codes + whole, n - whole, step, out + whole);
}

__attribute__((target("arch=x86-64-v3"))) void encode_few(const Table* table, Part part, uint8_t* codes,
                                                          float* residual) {
    encode_plainly<true>(*table, part, codes, residual);
}

__attribute__((target("arch=x86-64-v3"))) void encode_many(const Table* table, Part part, uint8_t* codes,
                                                           float* residual) {
    encode_plainly<false>(*table, part, codes, residual);
}

__attribute__((target("arch=x86-64-v3"))) void decode_few(const Table* table, const uint8_t* codes, size_t n,
                                                          float step, float* out) {
    decode_plainly(*table, codes, n, step, out);
}

#define THINWIRE_DEFAULT __attribute__((target("default")))
#else
#define THINWIRE_DEFAULT
#endif

THINWIRE_DEFAULT void encode_few(const Table* table, Part part, uint8_t* codes, float* residual) {
    encode_plainly<true>(*table, part, codes, residual);
}

THINWIRE_DEFAULT void encode_many(const Table* table, Part part, uint8_t* codes, float* residual) {
    encode_plainly<false>(*table, part, codes, residual);
}

THINWIRE_DEFAULT void decode_few(const Table* table, const uint8_t* codes, size_t n, float step, float* out) {
    decode_plainly(*table, codes, n, step, out);
}

struct LevelRule {
    using Scale = float;
    const Table* table;

    THINWIRE_INLINE float scale_of(const float* x, size_t n, Buckets buckets) const {
        return bucket_scale(x, n, buckets.l2);
    }

    template <bool with_residual>
    THINWIRE_INLINE void encode(const float* x, size_t n, Key key, uint32_t position, float scale, uint8_t* codes,
                                float* residual) const {
        if (!usable(scale)) {
            for (size_t i = 0; i < n; ++i) {
                codes[i] = 0;
                if (with_residual) residual[i] = x[i] - table->value[0] * scale;
            }
            return;
        }
        alignas(64) float u[kChunk];
        uint32_t counter = counter_at(key, position);
        for (size_t i = 0; i < n; ++i, counter += kCounterStep) u[i] = uniform_of(key, counter);
        const Part part{x, u, n, scale, 1.0f / scale};
        if (table->size <= kFewLevels)
            encode_few(table, part, codes, residual);
        else
            encode_many(table, part, codes, residual);
    }

    THINWIRE_INLINE float step(float scale, float weight) const { return scale * weight; }

    THINWIRE_INLINE void decode(const uint8_t* codes, size_t n, float step, float* out) const {
        if (table->size <= kFewLevels)
            decode_few(table, codes, n, step, out);
        else
            decode_many(table, codes, n, step, out);
    }
};

THINWIRE_CLONES void encode_segment(const Table* table, const float* x, size_t n, float* residual, Key key,
                                    const Buckets* buckets, uint8_t* scales, uint8_t* out) {
    encode_buckets<uint8_t>(LevelRule{table}, x, n, residual, key, *buckets, scales, out);
}

THINWIRE_CLONES void decode_segment(const Table* table, const uint8_t* scales, const uint8_t* codes, float* out,
                                    size_t n, float weight, const Buckets* buckets) {
    decode_buckets<uint8_t>(LevelRule{table}, scales, codes, out, n, weight, *buckets);
}

}  // namespace

void levels_encode(const Inputs& xs, Bytes out, const Keys& keys, const Levels& levels, const Outputs& residuals) {
    const Table table(levels.values, levels.buckets);
    for_each_encoded(xs, out, keys, levels.buckets, residuals,
                     [&](const float* x, size_t n, float* residual, Key key, uint8_t* scales, uint8_t* codes) {
                         encode_segment(&table, x, n, residual, key, &levels.buckets, scales, codes);
                     });
}

void levels_decode_add(Payload payload, const Outputs& outs, float weight, const Levels& levels) {
    const Table table(levels.values, levels.buckets);
    for_each_decoded(payload, outs, levels.buckets,
                     [&](const uint8_t* scales, const uint8_t* codes, float* out, size_t n) {
                         decode_segment(&table, scales, codes, out, n, weight, &levels.buckets);
                     });
}

}  // namespace thinwire
