// Signs, and the means of a bucket's negative elements and of the others.
#include "buckets.hpp"

namespace thinwire {

namespace {

struct Means {
    float low, high;
};

THINWIRE_INLINE float mean(double sum, size_t count) {
    if (count == 0) return 0.0f;
    const float mean = static_cast<float>(sum / static_cast<double>(count));
    return mean == mean ? mean : std::numeric_limits<float>::quiet_NaN();  // one NaN for all, so that bytes agree
}

struct OneBit {
    using Scale = Means;
    using Step = Means;

    THINWIRE_INLINE Means scale_of(const float* x, size_t n, Buckets) const {
        size_t num_negative = 0;
        for (size_t i = 0; i < n; ++i) num_negative += x[i] < 0;
        return {mean(tree_sum<Term::kNegative>(x, n), num_negative),
                mean(tree_sum<Term::kOther>(x, n), n - num_negative)};
    }

    template <bool with_residual>
    THINWIRE_INLINE void encode(const float* x, size_t n, Key, uint32_t, Means means, uint8_t* codes,
                                float* residual) const {
        THINWIRE_INDEPENDENT
        for (size_t i = 0; i < n; ++i) {
            const bool negative = x[i] < 0;
            codes[i] = negative;
            if (with_residual) residual[i] = x[i] - (negative ? means.low : means.high);
        }
    }

    THINWIRE_INLINE void read(const uint8_t* scales, size_t bucket, float weight, Means& step) const {
        const Means means = load<Means>(scales + bucket * sizeof(Means));
        step = {means.low * weight, means.high * weight};
    }

    THINWIRE_INLINE void decode(const uint8_t* codes, size_t n, Means step, float* out) const {
        THINWIRE_INDEPENDENT
        for (size_t i = 0; i < n; ++i) out[i] += codes[i] ? step.low : step.high;
    }
};

THINWIRE_CLONES void encode_part(const float* x, size_t n, float* residual, const Buckets* buckets, uint8_t* scales,
                                uint8_t* out) {
    encode_buckets<uint8_t>(OneBit(), x, n, residual, Key(0), *buckets, scales, out);
}

THINWIRE_CLONES void decode_part(const uint8_t* scales, const uint8_t* codes, float* out, size_t begin, size_t end,
                                 float weight, const Buckets* buckets) {
    decode_range<uint8_t, true>(OneBit(), scales, codes, out, begin, end, weight, *buckets);
}

}  // namespace

void onebit_encode(const Inputs& xs, Bytes out, size_t bucket_size, const Outputs& residuals) {
    const Buckets buckets{1, bucket_size, false};
    const auto encode = [&](size_t, const float* x, size_t n, float* residual, Key, uint8_t* scales, uint8_t* codes) {
        encode_part(x, n, residual, &buckets, scales, codes);
    };
    for_each_encoded(xs, out, Keys(xs.size()), OneGroup{buckets}, residuals, encode, sizeof(Means));
}

void onebit_decode_add(Payload payload, const Outputs& outs, float weight, size_t bucket_size) {
    const Buckets buckets{1, bucket_size, false};
    const auto decode = [&](size_t, const uint8_t* scales, const uint8_t* codes, float* out, size_t begin, size_t end) {
        decode_part(scales, codes, out, begin, end, weight, &buckets);
    };
    for_each_decoded(payload, outs, OneGroup{buckets}, decode, sizeof(Means));
}

}  // namespace thinwire
