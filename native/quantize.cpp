// Stochastic uniform quantization: evenly spaced levels.
#include "buckets.hpp"
#include "quantize_x86.hpp"

namespace thinwire {

namespace {

// Codes are bytes up to 8 bits, else 16-bit words.
template <typename Code>
struct Uniform {
    using Scale = float;
    using Step = float;
    int num_steps;

    THINWIRE_INLINE float scale_of(const float* x, size_t n, Buckets buckets) const {
        return uniform_scale(x, n, buckets.l2, num_steps);
    }

    template <bool with_residual>
    THINWIRE_INLINE void encode(const float* x, size_t n, Key key, uint32_t position, float scale, Code* codes,
                                float* residual) const {
        const int last = num_steps;
        const float steps = static_cast<float>(last), inv = steps / scale, step = scale / steps;
        if (!usable(scale)) {
            for (size_t i = 0; i < n; ++i) {
                codes[i] = 0;
                if (with_residual) residual[i] = x[i] - -steps * step;
            }
            return;
        }
        size_t done = 0;
#ifdef THINWIRE_X86
        if constexpr (sizeof(Code) == 1) {
            const UniformBucket bucket{key, position, inv, step, last, {}};
            if (has_avx2() && !has_avx512())
                done = encode_uniform<with_residual, false>(x, n, &bucket, codes, residual, nullptr);
        }
#endif
        uint32_t counter = counter_at(key, position + static_cast<uint32_t>(done));
        THINWIRE_INDEPENDENT
        for (size_t i = done; i < n; ++i, counter += kCounterStep) {
            const float u = uniform_of(key, counter);
            const float t = (x[i] * inv + steps) * 0.5f;
            // Scales stop short of the largest float, so that x may lie beyond: by less than a code up to 8 bits, where
            // t > -1 and truncation does what floor and clamping do, but by up to eight codes of 16 bits.
            int32_t code = std::min(static_cast<int32_t>(t + u), last);
            if (sizeof(Code) > 1) code = std::max(code, 0);
            codes[i] = static_cast<Code>(code);
            if (with_residual) residual[i] = x[i] - static_cast<float>(2 * code - last) * step;
        }
    }

    THINWIRE_INLINE void read(const uint8_t* scales, size_t bucket, float weight, float& step) const {
        step = load<float>(scales + bucket * sizeof(float)) / static_cast<float>(num_steps) * weight;
    }

    // A corrupt code may be beyond the last level.
    THINWIRE_INLINE double most(int bits) const {
        return std::max(1.0, 2.0 * ((1 << bits) - 1) / num_steps - 1.0);
    }

    THINWIRE_INLINE void decode(const Code* codes, size_t n, float step, float* out) const {
        const int last = num_steps;
        THINWIRE_INDEPENDENT
        for (size_t i = 0; i < n; ++i) out[i] += static_cast<float>(2 * codes[i] - last) * step;
    }

    THINWIRE_INLINE void write(const Code* codes, size_t n, float step, float* out) const {
        const int last = num_steps;
        THINWIRE_INDEPENDENT
        for (size_t i = 0; i < n; ++i) out[i] = static_cast<float>(2 * codes[i] - last) * step;
    }
};

THINWIRE_CLONES void encode_part(const float* x, size_t n, float* residual, Key key, const Quantizer* q,
                                 uint8_t* scales, uint8_t* out) {
    if (q->buckets.bits <= 8)
        encode_buckets<uint8_t>(Uniform<uint8_t>{q->num_steps}, x, n, residual, key, q->buckets, scales, out);
    else
        encode_buckets<uint16_t>(Uniform<uint16_t>{q->num_steps}, x, n, residual, key, q->buckets, scales, out);
}

THINWIRE_CLONES void decode_part(const uint8_t* scales, const uint8_t* codes, float* out, size_t begin, size_t end,
                                 float weight, const Quantizer* q) {
    const int steps = q->num_steps;
    if (q->buckets.bits <= 8)
        decode_range<uint8_t, true>(Uniform<uint8_t>{steps}, scales, codes, out, begin, end, weight, q->buckets);
    else
        decode_range<uint16_t, true>(Uniform<uint16_t>{steps}, scales, codes, out, begin, end, weight, q->buckets);
}

THINWIRE_CLONES bool sum_part(const std::vector<Part>& parts, float* out, size_t begin, size_t end, float weight,
                              const Quantizer* q) {
    if (q->buckets.bits <= 8)
        return sum_range<uint8_t>(Uniform<uint8_t>{q->num_steps}, parts, out, begin, end, weight, q->buckets);
    return sum_range<uint16_t>(Uniform<uint16_t>{q->num_steps}, parts, out, begin, end, weight, q->buckets);
}

THINWIRE_CLONES void fill_uniform(Key key, float* out, size_t n) {
    uint32_t counter = counter_at(key, 0);
    for (size_t i = 0; i < n; ++i, counter += kCounterStep) out[i] = uniform_of(key, counter);
}

// See OneGroup in buckets.hpp.
class Groups {
public:
    Groups(const Quantizers& quantizers, size_t num_segments) : all_(quantizers) {
        require(!all_.distinct.empty(), "quantizers: expected at least one");
        for (const Quantizer& q : all_.distinct)
            require(q.num_steps >= 1 && q.num_steps < 1 << q.buckets.bits, "num_steps: expected 1 to 2**bits - 1");
        require(all_.which.empty() || all_.which.size() == num_segments, "quantizers: expected one per segment");
        for (const size_t group : all_.which) require(group < size(), "quantizers: there is no such quantizer");
    }

    size_t size() const { return all_.distinct.size(); }
    size_t group(size_t segment) const { return all_.which.empty() ? 0 : all_.which[segment]; }
    const Buckets& operator[](size_t group) const { return all_.distinct[group].buckets; }
    const Quantizer* quantizer(size_t group) const { return &all_.distinct[group]; }

private:
    const Quantizers& all_;
};

}  // namespace

void uniform(uint64_t key, Output out) { fill_uniform(Key(key), out.data, out.numel); }

void quantize_encode(const Inputs& xs, Bytes out, const Keys& keys, const Quantizers& quantizers,
                     const Outputs& residuals) {
    const Groups groups(quantizers, xs.size());
    for_each_encoded(xs, out, keys, groups, residuals,
                     [&](size_t group, const float* x, size_t n, float* residual, Key key, uint8_t* scales,
                         uint8_t* codes) { encode_part(x, n, residual, key, groups.quantizer(group), scales, codes); });
}

void quantize_decode_add(Payload payload, const Outputs& outs, float weight, const Quantizers& quantizers) {
    const Groups groups(quantizers, outs.size());
    for_each_decoded(payload, outs, groups,
                     [&](size_t group, const uint8_t* scales, const uint8_t* codes, float* out, size_t begin,
                         size_t end) { decode_part(scales, codes, out, begin, end, weight, groups.quantizer(group)); });
}

bool quantize_decode_sum(const Payloads& payloads, const Outputs& outs, float weight, const Quantizers& quantizers) {
    const Groups groups(quantizers, outs.size());
    return for_each_summed(payloads, outs, groups,
                           [&](size_t group, const std::vector<Part>& parts, float* out, size_t begin, size_t end) {
                               return sum_part(parts, out, begin, end, weight, groups.quantizer(group));
                           });
}

}  // namespace thinwire
