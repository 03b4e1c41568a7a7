// Signs and a mean magnitude per segment.
#include <limits>

#include "pack.hpp"
#include "reduce.hpp"
#include "threads.hpp"

namespace thinwire {

namespace {

float mean_magnitude(std::vector<double>& block_sums, size_t n) {
    if (n == 0) return 0.0f;
    const float mean = static_cast<float>(sum_of_blocks(block_sums) / static_cast<double>(n));
    return mean == mean ? mean : std::numeric_limits<float>::quiet_NaN();  // one NaN for all, so that bytes agree
}

// Signs and sums in one pass over memory.
THINWIRE_CLONES void encode_part(const float* x, size_t n, double* block_sums, uint8_t* out) {
    alignas(64) uint8_t codes[kSumBlock];
    for (size_t start = 0; start < n; start += kSumBlock) {
        const size_t count = std::min(kSumBlock, n - start);
        const float* from = x + start;
        *block_sums++ = block_sum<Term::kMagnitude>(from, count);
        for (size_t i = 0; i < count; ++i) codes[i] = from[i] < 0;
        for (size_t i = count; i % 8; ++i) codes[i] = 0;
        pack_chunk<1>(codes, count, out + start / 8);
    }
}

THINWIRE_CLONES void subtract_signs(const float* x, size_t n, float scale, float* residual) {
    THINWIRE_INDEPENDENT
    for (size_t i = 0; i < n; ++i) residual[i] = x[i] - (x[i] < 0 ? -scale : scale);
}

THINWIRE_CLONES void decode_part(const uint8_t* payload, float value, float* out, size_t n) {
    alignas(64) uint8_t codes[kChunk];
    for (size_t start = 0; start < n; start += kChunk) {
        const size_t count = std::min(kChunk, n - start);
        float* to = out + start;
        prefetch(to + count, std::min(kChunk, n - start - count));
        unpack_chunk<1>(payload + start / 8, count, codes);
        THINWIRE_INDEPENDENT
        for (size_t i = 0; i < count; ++i) to[i] += static_cast<float>(1 - 2 * codes[i]) * value;
    }
}

template <typename Segment>
void check_nbytes(const std::vector<Segment>& segments, size_t nbytes) {
    size_t expected = 0;
    for (const Segment& segment : segments) expected += sizeof(float) + (segment.numel + 7) / 8;
    require(nbytes == expected, "payload: its size does not fit the segments");
}

}  // namespace

void sign_encode(const Inputs& xs, Bytes out, const Outputs& residuals, std::optional<float> fixed_scale) {
    check_nbytes(xs, out.numel);
    require_fitting(residuals, xs);
    uint8_t* signs = out.data + sizeof(float) * xs.size();
    for (size_t i = 0; i < xs.size(); ++i) {
        const size_t n = xs[i].numel;
        const float* x = xs[i].data;
        std::vector<double> block_sums((n + kSumBlock - 1) / kSumBlock);
        for_each_range(n, kSumBlock, [&](size_t begin, size_t end) {
            encode_part(x + begin, end - begin, block_sums.data() + begin / kSumBlock, signs + begin / 8);
        });
        float scale = mean_magnitude(block_sums, n);
        if (fixed_scale && scale > 0 && magnitude(scale) < kInfinityBits) scale = *fixed_scale;
        store(out.data + sizeof(float) * i, scale);
        if (!residuals.empty())
            for_each_range(n, 1, [&](size_t begin, size_t end) {
                subtract_signs(x + begin, end - begin, scale, residuals[i].data + begin);
            });
        signs += (n + 7) / 8;
    }
}

void sign_decode_add(Payload payload, const Outputs& outs, float weight) {
    check_nbytes(outs, payload.numel);
    std::vector<const uint8_t*> signs{payload.data + sizeof(float) * outs.size()};  // of each segment
    for (const Output& out : outs) signs.push_back(signs.back() + (out.numel + 7) / 8);
    for_each_piece(outs, kChunk, [&](size_t s, size_t begin, size_t end) {
        const float value = load<float>(payload.data + sizeof(float) * s) * weight;
        decode_part(signs[s] + begin / 8, value, outs[s].data + begin, end - begin);
    });
}

}  // namespace thinwire
