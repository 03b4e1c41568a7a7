// A few bits an element: each bit splits every bin of a bucket at its mean, the first one at zero, and an element becomes the
// mean of its bin.
#include <numeric>

#include "buckets.hpp"

namespace thinwire {

namespace {

constexpr int kMostBits = 8;
constexpr size_t kMostBins = 1 << kMostBits, kLanes = 8;
constexpr size_t kBlock = 1 << 14;  // elements whose codes stay in the cache until they are packed

// Moves each element to one of the two bins that its bin is split into; `means` become those of the `num_bins` new ones. NaN goes
// to the lower bin, and makes its mean NaN. Element i of a bucket is added to lane i mod kLanes, in order of i; then the lanes are
// halved: the reference's order, in which sums of one bin do not wait for each other.
THINWIRE_INLINE void split(const float* x, size_t n, uint8_t* codes, float* means, size_t num_bins, double* sums) {
    int32_t counts[kMostBins * kLanes];
    std::fill_n(counts, num_bins * kLanes, 0);
    std::fill_n(sums, num_bins * kLanes, 0.0);
    THINWIRE_INDEPENDENT
    for (size_t i = 0; i < n; ++i) codes[i] = static_cast<uint8_t>(2 * codes[i] + (x[i] >= means[codes[i]]));
    for (size_t i = 0; i < n; ++i) sums[codes[i] * kLanes + i % kLanes] += x[i];
    for (size_t i = 0; i < n; ++i) ++counts[codes[i] * kLanes + i % kLanes];
    for (size_t bin = 0; bin < num_bins; ++bin) {
        const int32_t count = std::accumulate(counts + bin * kLanes, counts + (bin + 1) * kLanes, 0);
        const float mean = static_cast<float>(halve(sums + bin * kLanes, kLanes) / std::max(count, 1));
        means[bin] = mean == mean ? mean : std::numeric_limits<float>::quiet_NaN();  // one NaN for all, so that bytes agree
    }
}

// A part that begins a bucket and a byte; `codes` has room for it, in whole chunks.
THINWIRE_CLONES void encode_part(const float* x, size_t n, float* residual, const Buckets* buckets, uint8_t* means_out,
                                uint8_t* codes, uint8_t* out) {
    const int bits = buckets->bits;
    double sums[kMostBins * kLanes];
    float means[kMostBins];
    for (size_t at = 0; at < n; at += buckets->size) {
        const size_t length = std::min(n - at, buckets->size);
        std::fill_n(codes + at, length, uint8_t{0});
        means[0] = 0.0f;
        for (int bit = 1; bit <= bits; ++bit) split(x + at, length, codes + at, means, size_t{1} << bit, sums);
        const size_t nbytes = sizeof(float) << bits;
        std::memcpy(means_out, means, nbytes);
        means_out += nbytes;
        if (residual)
            for (size_t i = at; i < at + length; ++i) residual[i] = x[i] - means[codes[i]];
    }
    for (size_t i = n; i % 8; ++i) codes[i] = 0;
    for (size_t at = 0; at < n; at += kChunk) pack_codes(bits, codes + at, std::min(kChunk, n - at), out + at / 8 * bits);
}

// Elements from `begin`, a multiple of kChunk, to `end`.
THINWIRE_CLONES void decode_part(const uint8_t* means, const uint8_t* payload, float* out, size_t begin, size_t end,
                                 float weight, const Buckets* buckets) {
    alignas(64) uint8_t codes[kChunk];
    float values[kMostBins];
    const size_t num_bins = size_t{1} << buckets->bits;
    size_t bucket = begin / buckets->size, bucket_end = begin;
    for (size_t start = begin; start < end; start += kChunk) {
        const size_t stop = std::min(end, start + kChunk);
        prefetch(out + stop, std::min(end, stop + kChunk) - stop);
        unpack_codes(buckets->bits, payload + start / 8 * buckets->bits, stop - start, codes);
        for (size_t at = start; at < stop;) {
            if (at == bucket_end) {
                const uint8_t* from = means + bucket * num_bins * sizeof(float);
                for (size_t i = 0; i < num_bins; ++i) values[i] = load<float>(from + i * sizeof(float)) * weight;
                bucket_end = ++bucket * buckets->size;
            }
            const size_t to = std::min(stop, bucket_end);
            THINWIRE_INDEPENDENT
            for (size_t i = at; i < to; ++i) out[i] += values[codes[i - start]];
            at = to;
        }
    }
}

// Where each segment's means and codes begin: first all means, then all codes.
template <typename Segment>
std::vector<Place> places_of(const std::vector<Segment>& segments, size_t nbytes, const Buckets& buckets) {
    require(buckets.bits >= 1 && buckets.bits <= kMostBits, "bits: expected 1 to 8");
    const size_t bucket_nbytes = sizeof(float) << buckets.bits;
    Place next{0, checked_scales_nbytes(segments, nbytes, buckets, bucket_nbytes)};
    std::vector<Place> places;
    for (const Segment& segment : segments) {
        places.push_back(next);
        next.scales += bucket_nbytes * num_buckets(segment.numel, buckets.size);
        next.codes += code_nbytes(segment.numel, buckets.bits);
    }
    return places;
}

}  // namespace

void bin_means_encode(const Inputs& xs, Bytes out, int bits, size_t bucket_size, const Outputs& residuals) {
    const Buckets buckets{bits, bucket_size, false};
    const std::vector<Place> places = places_of(xs, out.numel, buckets);
    require_fitting(residuals, xs);
    const size_t unit = encoded_unit(buckets), block = (kBlock + unit - 1) / unit * unit;
    for_each_piece(xs, unit, [&](size_t s, size_t begin, size_t end) {
        std::vector<uint8_t> codes(std::min(block, end - begin) + kChunk);
        for (size_t at = begin; at < end; at += block) {
            uint8_t* means = out.data + places[s].scales + (sizeof(float) << bits) * (at / bucket_size);
            float* residual = residuals.empty() ? nullptr : residuals[s].data + at;
            encode_part(xs[s].data + at, std::min(block, end - at), residual, &buckets, means, codes.data(),
                        out.data + places[s].codes + code_nbytes(at, bits));
        }
    });
}

void bin_means_decode_add(Payload payload, const Outputs& outs, float weight, int bits, size_t bucket_size) {
    const Buckets buckets{bits, bucket_size, false};
    const std::vector<Place> places = places_of(outs, payload.numel, buckets);
    for_each_piece(outs, kChunk, [&](size_t s, size_t begin, size_t end) {
        decode_part(payload.data + places[s].scales, payload.data + places[s].codes, outs[s].data, begin, end, weight,
                    &buckets);
    });
}

}  // namespace thinwire
