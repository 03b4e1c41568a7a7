// Shared by all quantizers. A segment is cut into buckets, each with a scale. Each bucket is read from memory once: its
// scale, codes and residual are computed while it is in the first-level cache.
#pragma once

#include <atomic>
#include <cmath>
#include <limits>

#include "kernels.hpp"
#include "pack.hpp"
#include "random.hpp"
#include "reduce.hpp"
#include "threads.hpp"

namespace thinwire {

constexpr float kMinScale = 0x1p-118f;      // below this, 255 / scale could overflow
constexpr float kMinScaleWide = 0x1p-110f;  // and 65535 / scale
constexpr float kMaxScale = 0x1.fffp127f;  // so that (scale / num_steps) * num_steps stays finite

// The float so many units in the last place away; x is not negative.
THINWIRE_INLINE float neighbour(float x, int32_t ulps) { return float_from_bits(magnitude(x) + ulps); }

THINWIRE_INLINE float stored_scale(float scale, bool finite, float least = kMinScale) {
    if (!finite) return scale;
    return scale < least ? 0.0f : std::min(scale, kMaxScale);
}

// The smallest float whose square is at least `sum`. Squares are exact in float64, so any backend's root will do.
THINWIRE_INLINE float root_of(double sum) {
    float root = static_cast<float>(std::sqrt(sum));
    if (static_cast<double>(root) * root < sum) root = neighbour(root, 1);
    const float below = neighbour(root, -1);
    return static_cast<double>(below) * below >= sum ? below : root;
}

THINWIRE_INLINE float bucket_scale(const float* x, size_t n, bool l2, float least = kMinScale) {
    const float nan = std::numeric_limits<float>::quiet_NaN();  // one NaN for all, so that bytes agree
    if (l2) {
        const double sum = tree_sum<Term::kSquare>(x, n);
        if (sum != sum) return nan;
        const bool finite = sum <= std::numeric_limits<double>::max();
        return stored_scale(finite ? root_of(sum) : static_cast<float>(sum), finite, least);
    }
    const int32_t largest = max_magnitude(x, n);
    return largest > kInfinityBits ? nan : stored_scale(float_from_bits(largest), largest < kInfinityBits, least);
}

// Of evenly spaced levels. One step is twice the scale: where that overflows, so may the residual, and the scale is infinite.
THINWIRE_INLINE float uniform_scale(const float* x, size_t n, bool l2, int num_steps) {
    const float scale = bucket_scale(x, n, l2, num_steps > 255 ? kMinScaleWide : kMinScale);
    return num_steps == 1 && scale > kMaxScale / 2 ? std::numeric_limits<float>::infinity() : scale;
}

// False where every code is zero: the scale is zero or not finite.
THINWIRE_INLINE bool usable(float scale) { return scale > 0 && scale <= kMaxScale; }

inline size_t num_buckets(size_t n, size_t bucket_size) { return (n + bucket_size - 1) / bucket_size; }

inline size_t code_nbytes(size_t n, int bits) { return (n * bits + 7) / 8; }

// Bytes of all scales, which come first.
template <typename Segment>
size_t checked_scales_nbytes(const std::vector<Segment>& segments, size_t nbytes, const Buckets& buckets,
                             size_t scale_nbytes) {
    require(buckets.bits >= 1 && buckets.bits <= 16, "bits: expected 1 to 16");
    require(buckets.size >= 1, "bucket_size: expected at least 1");
    size_t scales = 0, codes = 0;
    for (const Segment& segment : segments) {
        scales += scale_nbytes * num_buckets(segment.numel, buckets.size);
        codes += code_nbytes(segment.numel, buckets.bits);
    }
    require(nbytes == scales + codes, "payload: its size does not fit the segments");
    return scales;
}

// Groups of segments that share their buckets. The payload of a group is that of its segments alone; those of all groups follow
// one another. `group(s)` is that of a segment, and `groups[g]` has its buckets.
struct OneGroup {
    const Buckets& buckets;

    size_t size() const { return 1; }
    size_t group(size_t) const { return 0; }
    const Buckets& operator[](size_t) const { return buckets; }
};

// Where a segment's scales and codes begin in the payload.
struct Place {
    size_t scales, codes;
};

template <typename Segment, typename Groups>
std::vector<Place> checked_places(const std::vector<Segment>& segments, size_t nbytes, const Groups& groups,
                                  size_t scale_nbytes) {
    std::vector<Place> next(groups.size()), places;  // the bytes of each group, and then where its next segment begins
    const auto grow = [&](Place& at, size_t s) {
        const Buckets& buckets = groups[groups.group(s)];
        at.scales += scale_nbytes * num_buckets(segments[s].numel, buckets.size);
        at.codes += code_nbytes(segments[s].numel, buckets.bits);
    };
    for (size_t g = 0; g < groups.size(); ++g) {
        require(groups[g].bits >= 1 && groups[g].bits <= 16, "bits: expected 1 to 16");
        require(groups[g].size >= 1, "bucket_size: expected at least 1");
    }
    for (size_t s = 0; s < segments.size(); ++s) grow(next[groups.group(s)], s);
    size_t end = 0;
    for (Place& group : next) {
        const size_t begin = end, codes = begin + group.scales;
        end = codes + group.codes;
        group = {begin, codes};
    }
    require(nbytes == end, "payload: its size does not fit the segments");
    for (size_t s = 0; s < segments.size(); ++s) {
        Place& at = next[groups.group(s)];
        places.push_back(at);
        grow(at, s);
    }
    return places;
}

// Pieces of so many elements start both a bucket and a byte.
inline size_t encoded_unit(const Buckets& buckets) {
    size_t size = std::min(buckets.size, size_t{1} << 31);  // no segment is longer
    for (int twos = 0; twos < 3 && size % 8 != 0; ++twos) size *= 2;
    return size;
}

// `rule.scale_of(x, n, buckets)` is a bucket's scale, of the type Rule::Scale, and
// `rule.encode<with_residual>(x, n, key, position, scale, codes, residual)` codes a part of one bucket.
template <typename Code, typename Rule>
THINWIRE_INLINE void encode_buckets(const Rule& rule, const float* x, size_t n, float* residual, Key key,
                                    Buckets buckets, uint8_t* scales, uint8_t* out) {
    alignas(64) Code codes[kChunk];
    typename Rule::Scale scale{};
    size_t bucket_end = 0;
    for (size_t start = 0; start < n; start += kChunk) {
        const size_t end = std::min(n, start + kChunk);
        for (size_t at = start; at < end;) {
            if (at == bucket_end) {
                bucket_end = std::min(n, at + buckets.size);
                scale = rule.scale_of(x + at, bucket_end - at, buckets);
                store(scales, scale);
                scales += sizeof scale;
            }
            const size_t stop = std::min(end, bucket_end);
            Code* to = codes + (at - start);
            const uint32_t position = static_cast<uint32_t>(at);
            if (residual)
                rule.template encode<true>(x + at, stop - at, key, position, scale, to, residual + at);
            else
                rule.template encode<false>(x + at, stop - at, key, position, scale, to, nullptr);
            at = stop;
        }
        for (size_t i = end - start; i % 8; ++i) codes[i] = 0;
        pack_codes(buckets.bits, codes, end - start, out + start / 8 * buckets.bits);
    }
}

// `rule.decode(codes, n, step, out)` adds a part of one bucket to `out`, and `rule.write`, called unless `add`, overwrites it.
// `rule.read(scales, bucket, weight, step)` reads the bucket's step, of the type Rule::Step. Elements from `begin`, a multiple of
// kChunk, to `end` are decoded.
template <typename Code, bool add, typename Rule>
THINWIRE_INLINE void decode_range(const Rule& rule, const uint8_t* scales, const uint8_t* payload, float* out,
                                  size_t begin, size_t end, float weight, Buckets buckets) {
    alignas(64) Code codes[kChunk];
    typename Rule::Step step{};
    size_t bucket = begin / buckets.size, bucket_end = begin;
    for (size_t start = begin; start < end; start += kChunk) {
        const size_t stop = std::min(end, start + kChunk);
        if (add) prefetch(out + stop, std::min(end, stop + kChunk) - stop);
        unpack_codes(buckets.bits, payload + start / 8 * buckets.bits, stop - start, codes);
        for (size_t at = start; at < stop;) {
            if (at == bucket_end) {
                rule.read(scales, bucket, weight, step);
                bucket_end = ++bucket * buckets.size;
            }
            const size_t part = std::min(stop, bucket_end) - at;
            if constexpr (add)
                rule.decode(codes + (at - start), part, step, out + at);
            else
                rule.write(codes + (at - start), part, step, out + at);
            at += part;
        }
    }
}

// Scales and codes of a segment in one of several payloads.
struct Part {
    const uint8_t *scales, *codes;
};

constexpr size_t kCached = 8 * kChunk;  // elements that stay in the first-level cache while all payloads are added

// Whether every sum of decoded elements must be finite, because no magnitude exceeds its bucket's scale times `most`. Cheaper
// than checking the sums.
THINWIRE_INLINE bool surely_finite(const std::vector<Part>& parts, size_t first, size_t last, float weight,
                                  double most) {
    double bound = 0;
    for (const Part& part : parts) {
        float largest = 0;
        for (size_t i = first; i < last; ++i) {
            const float scale = std::fabs(load<float>(part.scales + i * sizeof(float)));
            if (!(scale <= kMaxScale)) return false;  // infinite, or no number
            largest = std::max(largest, scale);
        }
        bound += largest;
    }
    return bound * most * std::fabs(weight) < 0x1p126;  // with room for rounding
}

// Writes the sum of all parts, in their order; returns whether it is finite. `rule.most(bits)` is the largest magnitude of a
// code's value, in units of the scale.
template <typename Code, typename Rule>
THINWIRE_INLINE bool sum_range(const Rule& rule, const std::vector<Part>& parts, float* out, size_t begin, size_t stop,
                               float weight, Buckets buckets) {
    bool finite = true;
    const double most = rule.most(buckets.bits);
    const bool sure = surely_finite(parts, begin / buckets.size, num_buckets(stop, buckets.size), weight, most);
    for (size_t at = begin; at < stop; at += kCached) {
        const size_t end = std::min(stop, at + kCached);
        decode_range<Code, false>(rule, parts[0].scales, parts[0].codes, out, at, end, weight, buckets);
        for (size_t i = 1; i < parts.size(); ++i)
            decode_range<Code, true>(rule, parts[i].scales, parts[i].codes, out, at, end, weight, buckets);
        finite &= sure || max_magnitude(out + at, end - at) < kInfinityBits;
    }
    return finite;
}

// Calls `encode(group, x, n, residual, key, scales, codes)` for pieces of segments; each starts a bucket.
template <typename Groups, typename Encode>
void for_each_encoded(const Inputs& xs, Bytes out, const Keys& keys, const Groups& groups, const Outputs& residuals,
                      Encode encode, size_t scale_nbytes = sizeof(float)) {
    const std::vector<Place> places = checked_places(xs, out.numel, groups, scale_nbytes);
    require(keys.size() == xs.size(), "keys: expected one per segment");
    require_fitting(residuals, xs);
    const auto unit = [&](size_t s) { return encoded_unit(groups[groups.group(s)]); };
    for_each_piece(xs, unit, [&](size_t s, size_t begin, size_t end) {
        const size_t group = groups.group(s);
        uint8_t* scales = out.data + places[s].scales + scale_nbytes * (begin / groups[group].size);
        uint8_t* codes = out.data + places[s].codes + code_nbytes(begin, groups[group].bits);
        float* residual = residuals.empty() ? nullptr : residuals[s].data + begin;
        encode(group, xs[s].data + begin, end - begin, residual, key_from(Key(keys[s]), begin), scales, codes);
    });
}

// Calls `decode(group, scales, codes, out, begin, end)` for ranges of segments; the pointers are to the segments' starts.
template <typename Groups, typename Decode>
void for_each_decoded(Payload payload, const Outputs& outs, const Groups& groups, Decode decode,
                      size_t scale_nbytes = sizeof(float)) {
    const std::vector<Place> places = checked_places(outs, payload.numel, groups, scale_nbytes);
    for_each_piece(outs, kChunk, [&](size_t s, size_t begin, size_t end) {
        const uint8_t *scales = payload.data + places[s].scales, *codes = payload.data + places[s].codes;
        decode(groups.group(s), scales, codes, outs[s].data, begin, end);
    });
}

// Calls `sum(group, parts, out, begin, end)` for ranges of segments with the segment's parts of all payloads; returns whether
// all calls return true.
template <typename Groups, typename Sum>
bool for_each_summed(const Payloads& payloads, const Outputs& outs, const Groups& groups, Sum sum) {
    require(!payloads.empty(), "payloads: expected at least one");
    const std::vector<Place> places = checked_places(outs, payloads[0].numel, groups, sizeof(float));
    for (const Payload& p : payloads)
        require(p.numel == payloads[0].numel, "payload: its size does not fit the segments");
    std::atomic<bool> finite{true};
    for_each_piece(outs, kChunk, [&](size_t s, size_t begin, size_t end) {
        std::vector<Part> parts;
        for (const Payload& p : payloads) parts.push_back({p.data + places[s].scales, p.data + places[s].codes});
        if (!sum(groups.group(s), parts, outs[s].data, begin, end)) finite = false;
    });
    return finite;
}

}  // namespace thinwire
