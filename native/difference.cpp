// CHOCO and DeepSqueeze over evenly spaced levels: sums or differences are made, encoded and measured block by block, so
// that every vector in memory is read, or read and written, once. difference_add.cpp applies messages.
#include <array>
#include <numeric>

#include "buckets.hpp"
#include "quantize_x86.hpp"

namespace thinwire {

namespace {

constexpr size_t kBlock = 2048;  // elements of all buffers of a block fit the first two caches
constexpr size_t kFloatSum = 512;  // elements that may be added in float32

THINWIRE_CLONES void subtract(const float* x, const float* y, float* out, size_t n) {
    for (size_t i = 0; i < n; ++i) out[i] = x[i] - y[i];
}

THINWIRE_CLONES void add_into(const float* x, float* y, float* out, size_t n) {
    for (size_t i = 0; i < n; ++i) out[i] = y[i] = x[i] + y[i];
}

// <c, c>, <v, c> and <v, v> for the decoding c = v - lost.
using Sums = std::array<double, 3>;

template <typename T>
THINWIRE_INLINE Sums sums_of(const float* v, const float* lost, size_t n) {
    T cc[kSumLanes] = {}, vc[kSumLanes] = {}, vv[kSumLanes] = {};
    size_t i = 0;
    for (; i + kSumLanes <= n; i += kSumLanes)
        for (size_t lane = 0; lane < kSumLanes; ++lane) {
            const T x = v[i + lane], c = x - static_cast<T>(lost[i + lane]);
            cc[lane] += c * c, vc[lane] += x * c, vv[lane] += x * x;
        }
    for (size_t lane = 0; i + lane < n; ++lane) {
        const T x = v[i + lane], c = x - static_cast<T>(lost[i + lane]);
        cc[lane] += c * c, vc[lane] += x * c, vv[lane] += x * x;
    }
    Sums sums{};
    for (size_t lane = 0; lane < kSumLanes; ++lane) sums[0] += cc[lane], sums[1] += vc[lane], sums[2] += vv[lane];
    return sums;
}

// Short sums are taken in float32, unless squares might overflow or vanish.
THINWIRE_CLONES void add_sums(const float* v, const float* lost, size_t n, double* totals) {
    for (size_t at = 0; at < n; at += kFloatSum) {
        const size_t size = std::min(kFloatSum, n - at);
        Sums sums = sums_of<float>(v + at, lost + at, size);
        if (!(sums[0] < 1e30 && sums[2] > 1e-28 && sums[2] < 1e30)) sums = sums_of<double>(v + at, lost + at, size);
        for (size_t k = 0; k < 3; ++k) totals[k] += sums[k];
    }
}

THINWIRE_CLONES void add_dense_sums(const float* v, const float* c, size_t n, double* totals) {
    float lost[kFloatSum];
    for (size_t at = 0; at < n; at += kFloatSum) {
        const size_t size = std::min(kFloatSum, n - at);
        for (size_t i = 0; i < size; ++i) lost[i] = v[at + i] - c[at + i];
        Sums sums = sums_of<float>(v + at, lost, size);
        if (!(sums[0] < 1e30 && sums[2] > 1e-28 && sums[2] < 1e30)) sums = sums_of<double>(v + at, lost, size);
        for (size_t k = 0; k < 3; ++k) totals[k] += sums[k];
    }
}

// Elements of a block: whole buckets, whose codes fill whole bytes.
size_t block_of(const Buckets& buckets, size_t n) {
    const size_t unit = std::lcm(std::min(buckets.size, n + 8), size_t{8});
    return unit * std::max<size_t>(1, kBlock / unit);
}

#ifdef THINWIRE_X86

THINWIRE_CLONES float scale_clone(const float* x, size_t n, bool l2, int num_steps) {
    return uniform_scale(x, n, l2, num_steps);
}

THINWIRE_CLONES void pack_clone(int bits, const uint8_t* codes, size_t n, uint8_t* out) {
    pack_codes(bits, codes, n, out);
}

// Codes of a part of a bucket whose codes are all zero.
void encode_zeros(const float* v, size_t n, float zero, uint8_t* codes, double* totals) {
    float lost[kChunk];
    for (size_t i = 0; i < n; ++i) lost[i] = v[i] - zero;
    std::fill_n(codes, n, uint8_t{0});
    add_sums(v, lost, n, totals);
}

// Codes of a part of a bucket, and how well they fit: r is v in steps of half a level.
void encode_part(const float* v, size_t n, const UniformBucket& bucket, uint8_t* codes, double* totals) {
    Fit fit;
    size_t i = encode_uniform<false, true>(v, n, &bucket, codes, nullptr, &fit);
    for (; i < n; ++i) {
        const float u = uniform_of(bucket.key, counter_at(bucket.key, bucket.position + static_cast<uint32_t>(i)));
        const float r = v[i] * bucket.inv, t = (r + static_cast<float>(bucket.last)) * 0.5f;
        const int32_t code = std::min(static_cast<int32_t>(t + u), bucket.last), k = 2 * code - bucket.last;
        codes[i] = static_cast<uint8_t>(code);
        fit.kk += static_cast<double>(k) * k, fit.rk += static_cast<double>(r) * k;
        fit.rr += static_cast<double>(r) * static_cast<double>(r);
    }
    const double step = bucket.step, unit = 1.0 / static_cast<double>(bucket.inv);
    totals[0] += fit.kk * step * step, totals[1] += fit.rk * step * unit, totals[2] += fit.rr * unit * unit;
}

// Encodes whole buckets of up to 8 bits, and adds to the totals, in one pass after that for the scale. Meanwhile it asks
// for the vectors `next` of the next block.
void encode_measured(const float* v, size_t n, Key key, uint32_t position, const Quantizer& q, const float* const* next,
                     uint8_t* scales, uint8_t* out, double* totals) {
    alignas(64) uint8_t codes[kChunk];
    const float steps = static_cast<float>(q.num_steps);
    const size_t bucket_size = q.buckets.size;
    float scale = 0;
    for (size_t start = 0; start < n; start += kChunk) {
        const size_t end = std::min(n, start + kChunk);
        for (size_t at = start, size; at < end; at += size) {
            if (at % bucket_size == 0) {
                scale = scale_clone(v + at, std::min(bucket_size, n - at), q.buckets.l2, q.num_steps);
                store(scales + sizeof scale * (at / bucket_size), scale);
            }
            size = std::min(end - at, bucket_size - at % bucket_size);
            const float step = scale / steps;
            const UniformBucket bucket{key, position + static_cast<uint32_t>(at), steps / scale, step, q.num_steps,
                                       {next[0] + at, next[1] + at}};
            if (usable(scale))
                encode_part(v + at, size, bucket, codes + (at - start), totals);
            else
                encode_zeros(v + at, size, -steps * step, codes + (at - start), totals);
        }
        for (size_t i = end - start; i % 8; ++i) codes[i] = 0;
        pack_clone(q.buckets.bits, codes, end - start, out + start / 8 * static_cast<size_t>(q.buckets.bits));
    }
}

#endif

}  // namespace

std::vector<double> difference_encode(const Inputs& xs, const Outputs& ys, bool sum, Bytes out, const Keys& keys,
                                      const Quantizer& quantizer, bool measured) {
    const Buckets& buckets = quantizer.buckets;
    require(ys.size() == xs.size() && keys.size() == xs.size(), "expected one per segment");
    uint8_t* scales = out.data;
    const Quantizers alone{{quantizer}, {}};
    uint8_t* codes = scales + checked_scales_nbytes(xs, out.numel, buckets, sizeof(float));
    require(quantizer.num_steps >= 1 && quantizer.num_steps < 1 << buckets.bits, "num_steps: expected 1 to 2**bits - 1");
    std::vector<double> totals(3);
    std::vector<float> v, lost;
    std::vector<uint8_t> payload;
    Inputs input(1);
    Outputs residual(measured ? 1 : 0);
    Keys key(1);
    for (size_t s = 0; s < xs.size(); ++s) {
        const size_t n = xs[s].numel, block = block_of(buckets, n);
        require(ys[s].numel == n, "expected the segments' sizes");
        if (const size_t room = std::min(block, n); v.size() < room) v.resize(room), lost.resize(room);
        for (size_t at = 0; at < n; at += block) {
            const size_t size = std::min(block, n - at), num_scales = sizeof(float) * num_buckets(size, buckets.size);
            const float* x = xs[s].data + at;
            float* y = ys[s].data + at;
            if (sum)
                add_into(x, y, v.data(), size);
            else
                subtract(x, y, v.data(), size);
            const size_t num_codes = code_nbytes(size, buckets.bits);
#ifdef THINWIRE_X86
            if (measured && buckets.bits <= 8 && has_avx2()) {
                const size_t ahead = std::min(size, n - at - size);
                const float* next[] = {x + ahead, y + ahead};
                encode_measured(v.data(), size, Key(keys[s]), static_cast<uint32_t>(at), quantizer, next, scales, codes,
                                totals.data());
                scales += num_scales, codes += num_codes;
                continue;
            }
#endif
            const size_t following = std::min({block, kBlock, n - at - size});
            prefetch(x + size, following), prefetch(y + size, following);
            input[0] = {v.data(), size};
            if (measured) residual[0] = {lost.data(), size};
            // The generator's counter starts `at` elements later.
            key[0] = (keys[s] & ~uint64_t{0xffffffff}) | counter_at(Key(keys[s]), static_cast<uint32_t>(at));
            if (payload.size() < num_scales + num_codes) payload.resize(num_scales + num_codes);
            quantize_encode(input, {payload.data(), num_scales + num_codes}, key, alone, residual);
            std::memcpy(scales, payload.data(), num_scales);
            std::memcpy(codes, payload.data() + num_scales, num_codes);
            scales += num_scales, codes += num_codes;
            if (measured) add_sums(v.data(), lost.data(), size, totals.data());
        }
    }
    return totals;
}

std::vector<double> dense_sums(const Inputs& vs, const Inputs& cs) {
    require(vs.size() == cs.size(), "expected one per segment");
    std::vector<double> totals(3);
    for (size_t i = 0; i < vs.size(); ++i) {
        require(vs[i].numel == cs[i].numel, "expected the segments' sizes");
        add_dense_sums(vs[i].data, cs[i].data, vs[i].numel, totals.data());
    }
    return totals;
}

}  // namespace thinwire
