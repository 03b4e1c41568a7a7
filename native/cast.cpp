// Floats rounded to shorter ones, to nearest even, and their residuals, in one pass over memory.
#include <cmath>
#include <limits>

#include "reduce.hpp"
#include "threads.hpp"

namespace thinwire {

namespace {

// A type of one sign bit, `exponent_bits` and `mantissa_bits`. Its codes are held without the sign. From `special` on they
// are infinity and NaN as in IEEE 754, or, where there is no infinity, the one NaN.
template <typename Code_, int exponent_bits, int mantissa_bits, bool has_infinity>
struct Format {
    using Code = Code_;
    static constexpr int kShift = 23 - mantissa_bits, kBias = (1 << (exponent_bits - 1)) - 1;
    static constexpr int32_t kRebias = (127 - kBias) << 23;       // float32's bias less this one's
    static constexpr int32_t kLeastNormal = kRebias + (1 << 23);  // as a float32's bits
    static constexpr int32_t kUnit = kLeastNormal + (kShift << 23);  // its last place is that of smaller ones
    static constexpr int32_t kSpecial = has_infinity ? ((1 << exponent_bits) - 1) << mantissa_bits
                                                     : (1 << (exponent_bits + mantissa_bits)) - 1;
    static constexpr int32_t kNaN = has_infinity ? kSpecial | 1 << (mantissa_bits - 1) : kSpecial;
    static constexpr int32_t kNaNBits = kInfinityBits | 1 << 22;  // as a float32's bits
    static constexpr int32_t kOverflowBits = has_infinity ? kInfinityBits : kNaNBits;
    static constexpr int32_t kSign = 1 << (exponent_bits + mantissa_bits);
    static constexpr bool kSameRange = kRebias == 0;  // as float32's, so that the bits need only be cut

    struct Rounded {
        int32_t code;
        float value;  // the code's
    };

    static THINWIRE_INLINE Rounded round(float x) {
        const int32_t m = magnitude(x), half = (1 << (kShift - 1)) - 1 + (m >> kShift & 1);  // ties go to the even code
        const int32_t cut = static_cast<int32_t>(static_cast<uint32_t>(m) + static_cast<uint32_t>(half)) >> kShift;
        int32_t code = cut - (kRebias >> kShift), bits = cut << kShift;
        if (!kSameRange) {
            const float sum = float_from_bits(m) + float_from_bits(kUnit);  // rounds to that unit
            const bool is_small = m < kLeastNormal;
            bits = is_small ? magnitude(sum - float_from_bits(kUnit)) : code >= kSpecial ? kOverflowBits : bits;
            code = is_small ? magnitude(sum) - kUnit : std::min(code, kSpecial);
        }
        const bool is_nan = m > kInfinityBits;
        code = is_nan ? kNaN : code | (sign_bit(x) ? kSign : 0);
        return {code, float_from_bits((is_nan ? kNaNBits : bits) | sign_bit(x))};
    }

    static THINWIRE_INLINE float widen(int32_t code) {
        const int32_t m = code & (kSign - 1), sign = code & kSign ? INT32_MIN : 0;
        int32_t bits = (m << kShift) + kRebias;
        if (!kSameRange) {
            const float small = float_from_bits((m << kShift) + kLeastNormal) - float_from_bits(kLeastNormal);
            bits = bits < kLeastNormal ? magnitude(small) : bits;
            const int32_t special = has_infinity ? m << kShift | kInfinityBits : kNaNBits;
            bits = m >= kSpecial ? special : bits;
        }
        return float_from_bits(bits | sign);
    }
};

using BFloat16 = Format<uint16_t, 8, 7, true>;
using Float16 = Format<uint16_t, 5, 10, true>;
using E4M3 = Format<uint8_t, 4, 3, false>;
using E5M2 = Format<uint8_t, 5, 2, true>;

template <typename F, bool with_residual>
THINWIRE_INLINE void pack(const float* x, size_t n, float scale, uint8_t* out, float* residual) {
    const float inv = 1.0f / scale;  // exact: a power of two
    THINWIRE_INDEPENDENT
    for (size_t i = 0; i < n; ++i) {
        const float value = x[i];
        const typename F::Rounded rounded = F::round(value * inv);
        store(out + i * sizeof(typename F::Code), static_cast<typename F::Code>(rounded.code));
        if (with_residual) residual[i] = value - rounded.value * scale;
    }
}

template <typename F>
THINWIRE_INLINE void encode_as(const float* x, size_t n, float scale, uint8_t* out, float* residual) {
    residual ? pack<F, true>(x, n, scale, out, residual) : pack<F, false>(x, n, scale, out, residual);
}

template <typename F>
THINWIRE_INLINE void decode_as(const uint8_t* in, size_t n, float step, float* out) {
    THINWIRE_INDEPENDENT
    for (size_t i = 0; i < n; ++i) out[i] += F::widen(load<typename F::Code>(in + i * sizeof(typename F::Code))) * step;
}

THINWIRE_CLONES void encode_part(FloatType type, const float* x, size_t n, float scale, uint8_t* out,
                                 float* residual) {
    switch (type) {
        case FloatType::kBFloat16: return encode_as<BFloat16>(x, n, scale, out, residual);
        case FloatType::kFloat16: return encode_as<Float16>(x, n, scale, out, residual);
        case FloatType::kE4M3: return encode_as<E4M3>(x, n, scale, out, residual);
        case FloatType::kE5M2: return encode_as<E5M2>(x, n, scale, out, residual);
    }
}

THINWIRE_CLONES void decode_part(FloatType type, const uint8_t* in, size_t n, float step, float* out) {
    switch (type) {
        case FloatType::kBFloat16: return decode_as<BFloat16>(in, n, step, out);
        case FloatType::kFloat16: return decode_as<Float16>(in, n, step, out);
        case FloatType::kE4M3: return decode_as<E4M3>(in, n, step, out);
        case FloatType::kE5M2: return decode_as<E5M2>(in, n, step, out);
    }
}

THINWIRE_CLONES int32_t largest_of_part(const float* x, size_t n) { return max_magnitude(x, n); }

int32_t largest_of(const float* x, size_t n) {
    std::atomic<int32_t> largest{0};
    for_each_range(n, 1, [&](size_t begin, size_t end) {
        raise_to(largest, largest_of_part(x + begin, end - begin));
    });
    return largest;
}

// The least power of two by which x divided is at most `top`; 1 for zero, and not finite if x is not.
float scale_of(const float* x, size_t n, float top) {
    const int32_t bits = largest_of(x, n);
    if (bits > kInfinityBits) return std::numeric_limits<float>::quiet_NaN();
    if (bits == kInfinityBits) return std::numeric_limits<float>::infinity();
    if (bits == 0) return 1.0f;
    int exponent;
    if (std::frexp(float_from_bits(bits) / top, &exponent) == 0.5f) --exponent;
    return std::ldexp(1.0f, std::clamp(exponent, -126, 127));
}

size_t width_of(FloatType type) { return type == FloatType::kBFloat16 || type == FloatType::kFloat16 ? 2 : 1; }

// Bytes of the scales, which come first and which 16-bit types do without.
template <typename Segment>
size_t checked_scales_nbytes(FloatType type, const std::vector<Segment>& segments, size_t nbytes) {
    const size_t width = width_of(type), scales = width == 1 ? segments.size() * sizeof(float) : 0;
    size_t values = 0;
    for (const Segment& s : segments) values += s.numel * width;
    require(nbytes == scales + values, "payload: its size does not fit the segments");
    return scales;
}

}  // namespace

void cast_encode(const Inputs& xs, Bytes out, FloatType type, const Outputs& residuals) {
    const size_t scales_nbytes = checked_scales_nbytes(type, xs, out.numel);
    require_fitting(residuals, xs);
    const size_t width = width_of(type);
    uint8_t* values = out.data + scales_nbytes;
    for (size_t s = 0; s < xs.size(); ++s) {
        const size_t n = xs[s].numel;
        float scale = 1.0f;
        if (scales_nbytes > 0) {
            scale = scale_of(xs[s].data, n, type == FloatType::kE4M3 ? 448.0f : 57344.0f);
            store(out.data + s * sizeof scale, scale);
        }
        for_each_range(n, 1, [&](size_t begin, size_t end) {
            float* residual = residuals.empty() ? nullptr : residuals[s].data + begin;
            encode_part(type, xs[s].data + begin, end - begin, scale, values + begin * width, residual);
        });
        values += n * width;
    }
}

void cast_decode_add(Payload payload, const Outputs& outs, float weight, FloatType type) {
    const size_t scales_nbytes = checked_scales_nbytes(type, outs, payload.numel);
    const size_t width = width_of(type);
    std::vector<const uint8_t*> values{payload.data + scales_nbytes};  // of each segment
    for (const Output& out : outs) values.push_back(values.back() + out.numel * width);
    for_each_piece(outs, 1, [&](size_t s, size_t begin, size_t end) {
        const float scale = scales_nbytes > 0 ? load<float>(payload.data + s * sizeof(float)) : 1.0f;
        decode_part(type, values[s] + begin * width, end - begin, scale * weight, outs[s].data + begin);
    });
}

}  // namespace thinwire
