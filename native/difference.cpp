// CHOCO and DeepSqueeze over evenly spaced levels: sums or differences are made, encoded and measured block by block, and
// messages are decoded and applied block by block, so that every vector in memory is read, or read and written, once.
#include <array>
#include <numeric>

#include "buckets.hpp"

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

// A view of a part of a segment's codes as a payload of its own, put together in `buffer`.
Payload gathered(const Part& part, size_t at, size_t n, const Buckets& buckets, std::vector<uint8_t>& buffer) {
    const size_t scales = sizeof(float) * num_buckets(n, buckets.size), codes = code_nbytes(n, buckets.bits);
    if (buffer.size() < scales + codes) buffer.resize(scales + codes);
    std::memcpy(buffer.data(), part.scales + sizeof(float) * (at / buckets.size), scales);
    std::memcpy(buffer.data() + scales, part.codes + at / 8 * buckets.bits, codes);
    return {buffer.data(), scales + codes};
}

// Decodes blocks of all messages, each times its factor.
class Quantized {
  public:
    Quantized(const Payloads& payloads, const std::vector<float>& factors, const Quantizer& quantizer,
              const Outputs& segments)
        : factors_(factors), quantizer_(quantizer), values_(payloads.size()) {
        require(factors.size() == payloads.size(), "factors: expected one per payload");
        for (const Payload& p : payloads) {
            const size_t scales = checked_scales_nbytes(segments, p.numel, quantizer.buckets, sizeof(float));
            parts_.push_back({p.data, p.data + scales});
        }
    }
    size_t block(size_t n) const { return block_of(quantizer_.buckets, n); }
    const float* values(size_t k, size_t at, size_t n) {
        if (values_[k].size() < n) values_[k].resize(n);
        one_[0] = gathered(parts_[k], at, n, quantizer_.buckets, bytes_);
        out_[0] = {values_[k].data(), n};
        quantize_decode_sum(one_, out_, factors_[k], quantizer_);
        return values_[k].data();
    }
    void next_segment(size_t n) {
        for (Part& part : parts_) {
            part.scales += sizeof(float) * num_buckets(n, quantizer_.buckets.size);
            part.codes += code_nbytes(n, quantizer_.buckets.bits);
        }
    }

  private:
    const std::vector<float>& factors_;
    const Quantizer& quantizer_;
    std::vector<Part> parts_;
    std::vector<std::vector<float>> values_;
    std::vector<uint8_t> bytes_;
    Payloads one_{1};
    Outputs out_{1};
};

// Decoded messages, each one vector of all segments.
class Dense {
  public:
    Dense(const Inputs& vectors, const Outputs& segments) : vectors_(vectors) {
        size_t numel = 0;
        for (const Output& s : segments) numel += s.numel;
        for (const Input& v : vectors) require(v.numel == numel, "vectors: expected the segments' elements");
    }
    size_t block(size_t) const { return kBlock; }
    const float* values(size_t k, size_t at, size_t) { return vectors_[k].data + start_ + at; }
    void next_segment(size_t n) { start_ += n; }

  private:
    const Inputs& vectors_;
    size_t start_ = 0;
};

// h += v0;  s += w0 v0 + sum_k w_k v_k;  x += step (s - h).
THINWIRE_CLONES void choco_block(float* x, float* h, float* s, const float* own, const float* theirs, float own_weight,
                                 float weight, float step, size_t n) {
    THINWIRE_INDEPENDENT
    for (size_t i = 0; i < n; ++i) {
        const float public_copy = h[i] + own[i], sum = s[i] + own[i] * own_weight + theirs[i] * weight;
        h[i] = public_copy, s[i] = sum;
        x[i] += (sum - public_copy) * step;
    }
}

// lost -= v0;  x += step (sum_k w_k v_k - w0 v0).
THINWIRE_CLONES void squeeze_block(float* x, float* lost, const float* own, const float* theirs, float own_weight,
                                   float weight, float step, size_t n) {
    THINWIRE_INDEPENDENT
    for (size_t i = 0; i < n; ++i) {
        lost[i] -= own[i];
        x[i] += (theirs[i] * weight - own[i] * own_weight) * step;
    }
}

THINWIRE_CLONES void squeeze_block(float* x, const float* own, const float* theirs, float own_weight, float weight,
                                   float step, size_t n) {
    THINWIRE_INDEPENDENT
    for (size_t i = 0; i < n; ++i) x[i] += (theirs[i] * weight - own[i] * own_weight) * step;
}

THINWIRE_CLONES void weigh(const float* x, float weight, float* out, size_t n, bool add) {
    if (add) {
        THINWIRE_INDEPENDENT
        for (size_t i = 0; i < n; ++i) out[i] += x[i] * weight;
    } else {
        for (size_t i = 0; i < n; ++i) out[i] = x[i] * weight;
    }
}

// Messages 1 to the last, weighted and added; a single one is given as it is, with its weight.
struct Others {
    const float* values;
    float weight;
};

template <typename Source>
Others others(Source& source, const std::vector<float>& weights, size_t at, size_t n, std::vector<float>& sum) {
    if (weights.size() == 2) return {source.values(1, at, n), weights[1]};
    if (sum.size() < n) sum.resize(n);
    if (weights.size() == 1) std::fill_n(sum.data(), n, 0.0f);
    for (size_t k = 1; k < weights.size(); ++k) weigh(source.values(k, at, n), weights[k], sum.data(), n, k > 1);
    return {sum.data(), 1.0f};
}

// Calls `act(segment, start, size, own, others)` for each block of each segment.
template <typename Source, typename Act>
void for_each_block(Source& source, const Outputs& segments, const std::vector<float>& weights, Act act) {
    require(!weights.empty(), "weights: expected that of the own message first");
    std::vector<float> sum;
    for (size_t i = 0; i < segments.size(); ++i) {
        const size_t n = segments[i].numel, block = source.block(n);
        for (size_t at = 0; at < n; at += block) {
            const size_t size = std::min(block, n - at), next = std::min(block, n - at - size);
            prefetch(segments[i].data + at + size, std::min(next, kBlock));
            const float* own = source.values(0, at, size);
            act(i, at, size, own, others(source, weights, at, size, sum));
        }
        source.next_segment(n);
    }
}

void require_alike(const Outputs& xs, const Outputs& ys, const char* message) {
    require(xs.size() == ys.size(), message);
    for (size_t i = 0; i < xs.size(); ++i) require(xs[i].numel == ys[i].numel, message);
}

template <typename Source>
void choco_add(Source&& source, const Outputs& xs, const Outputs& hs, const Outputs& ss,
               const std::vector<float>& weights, float step) {
    for_each_block(source, xs, weights, [&](size_t i, size_t at, size_t n, const float* own, Others other) {
        choco_block(xs[i].data + at, hs[i].data + at, ss[i].data + at, own, other.values, weights[0], other.weight,
                    step, n);
    });
}

}  // namespace

std::vector<double> difference_encode(const Inputs& xs, const Outputs& ys, bool sum, Bytes out, const Keys& keys,
                                      const Quantizer& quantizer, bool measured) {
    const Buckets& buckets = quantizer.buckets;
    require(ys.size() == xs.size() && keys.size() == xs.size(), "expected one per segment");
    uint8_t* scales = out.data;
    uint8_t* codes = scales + checked_scales_nbytes(xs, out.numel, buckets, sizeof(float));
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
            const size_t next = std::min({block, kBlock, n - at - size});
            prefetch(x + size, next), prefetch(y + size, next);
            input[0] = {v.data(), size};
            if (measured) residual[0] = {lost.data(), size};
            // The generator's counter starts `at` elements later.
            key[0] = (keys[s] & ~uint64_t{0xffffffff}) | counter_at(Key(keys[s]), static_cast<uint32_t>(at));
            const size_t num_codes = code_nbytes(size, buckets.bits);
            if (payload.size() < num_scales + num_codes) payload.resize(num_scales + num_codes);
            quantize_encode(input, {payload.data(), num_scales + num_codes}, key, quantizer, residual);
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

void choco_decode_add(const Outputs& xs, const Outputs& hs, const Outputs& ss, const Payloads& payloads,
                      const std::vector<float>& factors, const std::vector<float>& weights, float step,
                      const Quantizer& quantizer) {
    require_alike(xs, hs, "copies: expected the segments' sizes");
    require_alike(xs, ss, "sums: expected the segments' sizes");
    require(payloads.size() == weights.size(), "weights: expected one per payload");
    choco_add(Quantized(payloads, factors, quantizer, xs), xs, hs, ss, weights, step);
}

void choco_dense_add(const Outputs& xs, const Outputs& hs, const Outputs& ss, const Inputs& vectors,
                     const std::vector<float>& weights, float step) {
    require_alike(xs, hs, "copies: expected the segments' sizes");
    require_alike(xs, ss, "sums: expected the segments' sizes");
    require(vectors.size() == weights.size(), "weights: expected one per vector");
    choco_add(Dense(vectors, xs), xs, hs, ss, weights, step);
}

void squeeze_decode_add(const Outputs& xs, const Outputs& losts, const Payloads& payloads,
                        const std::vector<float>& factors, const std::vector<float>& weights, float step,
                        const Quantizer& quantizer) {
    if (!losts.empty()) require_alike(xs, losts, "lost: expected the segments' sizes");
    require(payloads.size() == weights.size(), "weights: expected one per payload");
    Quantized source(payloads, factors, quantizer, xs);
    for_each_block(source, xs, weights, [&](size_t i, size_t at, size_t n, const float* own, Others other) {
        float* x = xs[i].data + at;
        if (losts.empty())
            squeeze_block(x, own, other.values, weights[0], other.weight, step, n);
        else
            squeeze_block(x, losts[i].data + at, own, other.values, weights[0], other.weight, step, n);
    });
}

}  // namespace thinwire
