// Stochastic quantization to any sorted set of levels in [-1, 1], times the bucket's scale.
#include "levels.hpp"

#include "levels_x86.hpp"

namespace thinwire {

namespace {

void encode_elements(const Table& table, const Elements& part, uint8_t* codes, float* residual) {
#ifdef THINWIRE_X86
    if (table.few() && has_avx512()) return encode_few_avx512(table, part, codes, residual);
    if (has_avx2() && (table.few() || table.cells))
        return residual ? encode_avx2<true>(table, part, codes, residual)
                        : encode_avx2<false>(table, part, codes, residual);
#endif
    encode_plainly(table, part, codes, residual);
}

void decode_elements(const Table& table, const uint8_t* codes, size_t n, float step, float* out) {
#ifdef THINWIRE_X86
    if (table.few() && has_avx512()) return decode_few_avx512(table, codes, n, step, out);
    if (has_avx2()) return decode_avx2(table, codes, n, step, out);
#endif
    decode_plainly(table, codes, n, step, out);
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
        encode_elements(*table, {x, u, n, scale, 1.0f / scale}, codes, residual);
    }

    THINWIRE_INLINE float step(float scale, float weight) const { return scale * weight; }

    THINWIRE_INLINE void decode(const uint8_t* codes, size_t n, float step, float* out) const {
        decode_elements(*table, codes, n, step, out);
    }
};

THINWIRE_CLONES void encode_part(const Table* table, const float* x, size_t n, float* residual, Key key,
                                 const Buckets* buckets, uint8_t* scales, uint8_t* out) {
    encode_buckets<uint8_t>(LevelRule{table}, x, n, residual, key, *buckets, scales, out);
}

THINWIRE_CLONES void decode_part(const Table* table, const uint8_t* scales, const uint8_t* codes, float* out,
                                 size_t begin, size_t end, float weight, const Buckets* buckets) {
    decode_range<uint8_t, true>(LevelRule{table}, scales, codes, out, begin, end, weight, *buckets);
}

}  // namespace

void levels_encode(const Inputs& xs, Bytes out, const Keys& keys, const Levels& levels, const Outputs& residuals) {
    const Table table(levels.values, levels.buckets, true);
    for_each_encoded(xs, out, keys, levels.buckets, residuals,
                     [&](const float* x, size_t n, float* residual, Key key, uint8_t* scales, uint8_t* codes) {
                         encode_part(&table, x, n, residual, key, &levels.buckets, scales, codes);
                     });
}

void levels_decode_add(Payload payload, const Outputs& outs, float weight, const Levels& levels) {
    const Table table(levels.values, levels.buckets, false);
    for_each_decoded(payload, outs, levels.buckets,
                     [&](const uint8_t* scales, const uint8_t* codes, float* out, size_t begin, size_t end) {
                         decode_part(&table, scales, codes, out, begin, end, weight, &levels.buckets);
                     });
}

}  // namespace thinwire
