// Stochastic quantization to any sorted set of levels in [-1, 1], times the bucket's scale.
#include "levels.hpp"

#include "levels_x86.hpp"

namespace thinwire {

namespace {

// Whether permutations of a register find levels faster than the exponents of powers of two do.
bool in_registers(const Table& table) {
#ifdef THINWIRE_X86
    if (has_avx512()) return table.few();
    if (has_avx2()) return table.size <= 8;
#endif
    (void)table;
    return false;
}

void encode_elements(const Table& table, const Elements& part, uint8_t* codes, float* residual) {
#ifdef THINWIRE_X86
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

// Codes of a part of one bucket, and residuals where wanted.
template <bool with_residual>
THINWIRE_INLINE void encode_by_exponents(const Table& table, const Drawn& part, uint8_t* codes, float* residual) {
    const Powers p = table.powers;
    alignas(64) int32_t wide[kChunk];  // the loop uses fewer registers without bytes
    uint32_t counter = counter_at(part.key, part.position);
    THINWIRE_INDEPENDENT
    for (size_t i = 0; i < part.n; ++i, counter += kCounterStep) {
        const float u = uniform_of(part.key, counter), r = part.x[i] * part.inv;
        const int32_t minus = -static_cast<int32_t>(r < 0);  // all bits, or none
        // The gap between levels is as wide as the power of two below |r|. A level belongs to the gap above it.
        const int32_t power = (magnitude(r) + minus) & kInfinityBits;
        const int32_t gap = std::min(std::max(power, p.least - Powers::kNext), p.most - Powers::kNext);
        const int32_t inner = (gap - p.least) >> 31, first = inner & ~minus;
        const float width = float_from_bits((gap & ~inner) | (p.around_zero & inner));
        const int32_t outer = gap + (minus & (INT32_MIN + Powers::kNext));  // the lower level of a negative gap
        const float low = float_from_bits((outer & ~first) | (p.below_zero & first));
        const int32_t up = -static_cast<int32_t>(r - low > u * width);
        const int32_t steps = (gap - p.least + Powers::kNext) >> 23;
        wide[i] = p.code + (steps ^ minus) + (minus & p.code_shift) - up;
        const float sent = low + float_from_bits(magnitude(width) & up);
        if (with_residual) residual[i] = part.x[i] - sent * part.scale;
    }
    for (size_t i = 0; i < part.n; ++i) codes[i] = static_cast<uint8_t>(wide[i]);
}

// The same codes for any levels.
template <bool with_residual>
THINWIRE_INLINE void encode_by_search(const Table& table, const Drawn& part, uint8_t* codes, float* residual) {
    size_t done = 0;
#ifdef THINWIRE_X86
    if (table.few() && has_avx512()) done = encode_few_avx512<with_residual>(table, part, codes, residual);
#endif
    if (done == part.n) return;
    alignas(64) float u[kChunk];
    uint32_t counter = counter_at(part.key, part.position + static_cast<uint32_t>(done));
    for (size_t i = 0; i < part.n - done; ++i, counter += kCounterStep) u[i] = uniform_of(part.key, counter);
    float* rest = with_residual ? residual + done : nullptr;
    encode_elements(table, {part.x + done, u, part.n - done, part.scale, part.inv}, codes + done, rest);
}

template <bool by_exponents>
struct LevelRule {
    using Scale = float;
    using Step = float;
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
        const Drawn part{x, n, scale, 1.0f / scale, key, position};
        if constexpr (by_exponents)
            encode_by_exponents<with_residual>(*table, part, codes, residual);
        else
            encode_by_search<with_residual>(*table, part, codes, residual);
    }

    THINWIRE_INLINE void read(const uint8_t* scales, size_t bucket, float weight, float& step) const {
        step = load<float>(scales + bucket * sizeof(float)) * weight;
    }

    THINWIRE_INLINE void decode(const uint8_t* codes, size_t n, float step, float* out) const {
        decode_elements(*table, codes, n, step, out);
    }
};

THINWIRE_CLONES void encode_part(const Table* table, const float* x, size_t n, float* residual, Key key,
                                 const Buckets* buckets, uint8_t* scales, uint8_t* out) {
    if (table->powers && !in_registers(*table))
        encode_buckets<uint8_t>(LevelRule<true>{table}, x, n, residual, key, *buckets, scales, out);
    else
        encode_buckets<uint8_t>(LevelRule<false>{table}, x, n, residual, key, *buckets, scales, out);
}

THINWIRE_CLONES void decode_part(const Table* table, const uint8_t* scales, const uint8_t* codes, float* out,
                                 size_t begin, size_t end, float weight, const Buckets* buckets) {
    decode_range<uint8_t, true>(LevelRule<false>{table}, scales, codes, out, begin, end, weight, *buckets);
}

}  // namespace

void levels_encode(const Inputs& xs, Bytes out, const Keys& keys, const Levels& levels, const Outputs& residuals) {
    const Table table(levels.values, levels.buckets, true);
    for_each_encoded(xs, out, keys, OneGroup{levels.buckets}, residuals,
                     [&](size_t, const float* x, size_t n, float* residual, Key key, uint8_t* scales, uint8_t* codes) {
                         encode_part(&table, x, n, residual, key, &levels.buckets, scales, codes);
                     });
}

void levels_decode_add(Payload payload, const Outputs& outs, float weight, const Levels& levels) {
    const Table table(levels.values, levels.buckets, false);
    for_each_decoded(payload, outs, OneGroup{levels.buckets},
                     [&](size_t, const uint8_t* scales, const uint8_t* codes, float* out, size_t begin, size_t end) {
                         decode_part(&table, scales, codes, out, begin, end, weight, &levels.buckets);
                     });
}

}  // namespace thinwire
