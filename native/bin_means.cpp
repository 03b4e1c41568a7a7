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

struct BinMeans {
    // Each bin's mean, weighted.
    struct Step {
        float of[kMostBins];
    };
    size_t num_bins;

    THINWIRE_INLINE void read(const uint8_t* means, size_t bucket, float weight, Step& step) const {
        const uint8_t* from = means + bucket * num_bins * sizeof(float);
        for (size_t i = 0; i < num_bins; ++i) step.of[i] = load<float>(from + i * sizeof(float)) * weight;
    }

    THINWIRE_INLINE void decode(const uint8_t* codes, size_t n, const Step& step, float* out) const {
        THINWIRE_INDEPENDENT
        for (size_t i = 0; i < n; ++i) out[i] += step.of[codes[i]];
    }
};

THINWIRE_CLONES void decode_part(const uint8_t* means, const uint8_t* codes, float* out, size_t begin, size_t end,
                                 float weight, const Buckets* buckets) {
    decode_range<uint8_t, true>(BinMeans{size_t{1} << buckets->bits}, means, codes, out, begin, end, weight, *buckets);
}

Buckets checked_buckets(int bits, size_t bucket_size) {
    require(bits >= 1 && bits <= kMostBits, "bits: expected 1 to 8");
    require(bucket_size >= 1, "bucket_size: expected at least 1");
    return {bits, bucket_size, false};
}

}  // namespace

void bin_means_encode(const Inputs& xs, Bytes out, int bits, size_t bucket_size, const Outputs& residuals) {
    const Buckets buckets = checked_buckets(bits, bucket_size);
    const size_t unit = encoded_unit(buckets), block = (kBlock + unit - 1) / unit * unit, means_nbytes = sizeof(float) << bits;
    const auto encode = [&](size_t, const float* x, size_t n, float* residual, Key, uint8_t* means, uint8_t* to) {
        std::vector<uint8_t> codes(std::min(block, n) + kChunk);
        for (size_t at = 0; at < n; at += block)
            encode_part(x + at, std::min(block, n - at), residual ? residual + at : nullptr, &buckets,
                        means + at / bucket_size * means_nbytes, codes.data(), to + code_nbytes(at, bits));
    };
    for_each_encoded(xs, out, Keys(xs.size()), OneGroup{buckets}, residuals, encode, means_nbytes);
}

void bin_means_decode_add(Payload payload, const Outputs& outs, float weight, int bits, size_t bucket_size) {
    const Buckets buckets = checked_buckets(bits, bucket_size);
    const auto decode = [&](size_t, const uint8_t* means, const uint8_t* codes, float* out, size_t begin, size_t end) {
        decode_part(means, codes, out, begin, end, weight, &buckets);
    };
    for_each_decoded(payload, outs, OneGroup{buckets}, decode, sizeof(float) << bits);
}

}  // namespace thinwire
