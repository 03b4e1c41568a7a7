// Stochastic rounding to -1, 0 or 1 times a scale. A digit is the value plus 1, or the sum of the digits of many workers.
// A byte packs 5 ternary digits. An int32 packs as many digits of a larger base as fit, so that words can be added.
#include "buckets.hpp"

namespace thinwire {

namespace {

// Words of one block. The digits lie in planes: element i is digit i / width of word i % width, so all words are packed in
// the same way. The last block of a segment is narrower.
constexpr size_t kWords = 64;
constexpr int kMaxDigits = 19;  // of base 3 in an int32

template <typename Word>
int digits_per_word(int base) {
    if (sizeof(Word) == 1) return 5;
    int digits = 0;
    for (uint64_t power = base; power <= uint64_t{1} << 31; power *= base) ++digits;
    return digits;
}

// Clips at `clip` standard deviations of the segment. It sums x - x[0], so that a large mean costs no precision.
THINWIRE_INLINE float clip_limit(double sum, double squares, size_t n, float clip) {
    const double count = static_cast<double>(n), variance = (squares - sum * sum / count) / count;
    const float infinity = std::numeric_limits<float>::infinity();
    return variance > 0 && variance <= std::numeric_limits<double>::max() ? clip * root_of(variance) : infinity;
}

// What the scales of a segment follow from: sums of x - x[0] and of its squares by block, and magnitudes by bucket.
struct Statistics {
    bool clips;
    size_t bucket_size;
    std::vector<double> sums, squares;
    std::vector<std::atomic<int32_t>> largest;

    Statistics(size_t n, bool clips, size_t bucket_size)
        : clips(clips),
          bucket_size(bucket_size),
          sums((n + kSumBlock - 1) / kSumBlock),
          squares(sums.size()),
          largest(num_buckets(n, bucket_size)) {}
};

// Of elements from `begin`, where a block starts.
THINWIRE_CLONES void find_statistics(const float* x, size_t begin, size_t stop, Statistics& found) {
    for (size_t start = begin; start < stop; start += kSumBlock) {
        const size_t end = std::min(stop, start + kSumBlock);
        double sum[kSumLanes] = {}, square[kSumLanes] = {};
        const double first = x[0];
        for (size_t at = start; found.clips && at < end; at += kSumLanes) {
            const size_t lanes = std::min(kSumLanes, end - at);
            if (lanes == kSumLanes)
                for (size_t lane = 0; lane < kSumLanes; ++lane) {
                    const double shifted = x[at + lane] - first;
                    sum[lane] += shifted, square[lane] += shifted * shifted;
                }
            else
                for (size_t lane = 0; lane < lanes; ++lane) {
                    const double shifted = x[at + lane] - first;
                    sum[lane] += shifted, square[lane] += shifted * shifted;
                }
        }
        found.sums[start / kSumBlock] = halve(sum, kSumLanes), found.squares[start / kSumBlock] = halve(square, kSumLanes);
        for (size_t at = start; at < end;) {
            const size_t bucket = at / found.bucket_size, to = std::min(end, (bucket + 1) * found.bucket_size);
            raise_to(found.largest[bucket], max_magnitude(x + at, to - at));
            at = to;
        }
    }
}

void segment_scales(const float* x, size_t n, float clip, size_t bucket_size, float* scales) {
    Statistics found(n, clip < std::numeric_limits<float>::infinity(), bucket_size);
    for_each_range(n, kSumBlock, [&](size_t begin, size_t end) { find_statistics(x, begin, end, found); });
    if (n == 0) return;
    const float limit = clip_limit(sum_of_blocks(found.sums), sum_of_blocks(found.squares), n, clip);
    for (size_t i = 0; i < found.largest.size(); ++i) {
        const float largest = float_from_bits(found.largest[i]);
        if (largest != largest)
            scales[i] = std::numeric_limits<float>::quiet_NaN();
        else
            scales[i] = magnitude(largest) == kInfinityBits ? largest : stored_scale(std::min(largest, limit), true);
    }
}

template <bool with_residual>
THINWIRE_INLINE void encode(const float* x, size_t n, Key key, uint32_t position, float scale, uint8_t* digits,
                            float* residual) {
    if (!usable(scale)) {
        for (size_t i = 0; i < n; ++i) {
            digits[i] = 1;
            if (with_residual) residual[i] = x[i] - 0.0f * scale;
        }
        return;
    }
    const float inv = 1.0f / scale;
    uint32_t counter = counter_at(key, position);
    THINWIRE_INDEPENDENT
    for (size_t i = 0; i < n; ++i, counter += kCounterStep) {
        const float u = uniform_of(key, counter), r = x[i] * inv;
        const int32_t value = (u < r) - (u < -r);
        digits[i] = static_cast<uint8_t>(value + 1);
        if (with_residual) residual[i] = x[i] - static_cast<float>(value) * scale;
    }
}

struct Radix {
    int base, digits;
    size_t bucket_size;
};

// Of elements from `begin`, where a block starts; `out` is the segment's first word.
template <typename Word>
THINWIRE_INLINE void pack_words(Radix radix, const float* x, const float* scales, size_t begin, size_t stop,
                                float* residual, Key key, uint8_t* out) {
    alignas(64) uint8_t digits[kWords * kMaxDigits];
    const size_t block = kWords * radix.digits;
    out += begin / radix.digits * sizeof(Word);
    for (size_t start = begin; start < stop; start += block) {
        const size_t end = std::min(stop, start + block), width = (end - start + radix.digits - 1) / radix.digits;
        for (size_t at = start; at < end;) {
            const size_t bucket = at / radix.bucket_size;
            const size_t to = std::min(end, (bucket + 1) * radix.bucket_size);
            const uint32_t position = static_cast<uint32_t>(at);
            if (residual)
                encode<true>(x + at, to - at, key, position, scales[bucket], digits + at - start, residual + at);
            else
                encode<false>(x + at, to - at, key, position, scales[bucket], digits + at - start, nullptr);
            at = to;
        }
        for (size_t i = end - start; i < width * radix.digits; ++i) digits[i] = 0;
        Word words[kWords] = {};
        for (int plane = radix.digits - 1; plane >= 0; --plane)
            for (size_t j = 0; j < width; ++j)
                words[j] = static_cast<Word>(words[j] * static_cast<Word>(radix.base) + digits[plane * width + j]);
        std::memcpy(out, words, width * sizeof(Word));
        out += width * sizeof(Word);
    }
}

// Divides each word by the base and stores the remainder in `digits`.
template <typename Word>
THINWIRE_INLINE void divide(Word* words, int base, Word* digits) {
    const double inv = 1.0 / base;
    for (size_t j = 0; j < kWords; ++j) {
        // Exact: adding one half keeps the product farther from the integers than its rounding error.
        const Word quotient = sizeof(Word) == 1
                                  ? static_cast<Word>((words[j] * 171u) >> 9)
                                  : static_cast<Word>(static_cast<int64_t>((static_cast<double>(words[j]) + 0.5) * inv));
        digits[j] = static_cast<Word>(words[j] - quotient * static_cast<Word>(base));
        words[j] = quotient;
    }
}

// Of elements from `begin`, where a block starts; `payload` is the segment's first word.
template <typename Word>
THINWIRE_INLINE void add_words(Radix radix, const uint8_t* payload, const float* scales, float* out, size_t begin,
                               size_t stop, float weight) {
    const size_t block = kWords * radix.digits;
    const int32_t zero = radix.base / 2;  // the digit, or sum of digits, of the value 0
    payload += begin / radix.digits * sizeof(Word);
    for (size_t start = begin; start < stop; start += block) {
        const size_t end = std::min(stop, start + block), width = (end - start + radix.digits - 1) / radix.digits;
        prefetch(out + end, std::min(stop, end + block) - end);
        Word words[kWords] = {}, digits[kWords];
        std::memcpy(words, payload, width * sizeof(Word));
        payload += width * sizeof(Word);
        for (size_t at = start; at < end;) {
            const size_t plane_end = std::min(end, at + width);
            divide(words, radix.base, digits);
            for (const size_t from = at; at < plane_end;) {
                const size_t bucket = at / radix.bucket_size;
                const size_t to = std::min(plane_end, (bucket + 1) * radix.bucket_size);
                const float step = scales[bucket] * weight;
                THINWIRE_INDEPENDENT
                for (size_t i = at; i < to; ++i)
                    out[i] += static_cast<float>(static_cast<int32_t>(digits[i - from]) - zero) * step;
                at = to;
            }
        }
    }
}

THINWIRE_CLONES void encode_part(const Radix* radix, const float* x, const float* scales, size_t begin, size_t end,
                                 float* residual, Key key, uint8_t* out) {
    if (radix->base == 3)
        pack_words<uint8_t>(*radix, x, scales, begin, end, residual, key, out);
    else
        pack_words<uint32_t>(*radix, x, scales, begin, end, residual, key, out);
}

THINWIRE_CLONES void decode_part(const Radix* radix, const uint8_t* payload, const float* scales, float* out,
                                 size_t begin, size_t end, float weight) {
    if (radix->base == 3)
        add_words<uint8_t>(*radix, payload, scales, out, begin, end, weight);
    else
        add_words<uint32_t>(*radix, payload, scales, out, begin, end, weight);
}

size_t segment_nbytes(const Radix& radix, size_t n) {
    return (n + radix.digits - 1) / radix.digits * (radix.base == 3 ? sizeof(uint8_t) : sizeof(uint32_t));
}

// Where the words of a segment begin in the payload, and its scales among all.
struct WordPlace {
    size_t words, scales;
};

struct Layout {
    Radix radix;
    std::vector<WordPlace> places;

    size_t unit() const { return kWords * radix.digits; }
};

template <typename Segment>
Layout checked_layout(const std::vector<Segment>& segments, size_t nbytes, size_t num_scales, const Ternary& ternary) {
    const int base = ternary.base;
    const size_t bucket_size = ternary.bucket_size;
    require(base >= 3 && base % 2 == 1 && base < 1 << 30, "base: expected an odd number, 3 or more");
    require(bucket_size >= 1, "bucket_size: expected at least 1");
    Layout layout{{base, base == 3 ? digits_per_word<uint8_t>(base) : digits_per_word<uint32_t>(base), bucket_size}, {}};
    WordPlace end{0, 0};
    for (const Segment& segment : segments) {
        layout.places.push_back(end);
        end.words += segment_nbytes(layout.radix, segment.numel);
        end.scales += num_buckets(segment.numel, bucket_size);
    }
    require(nbytes == end.words, "payload: its size does not fit the segments");
    require(num_scales == end.scales, "scales: expected one per bucket");
    return layout;
}

}  // namespace

void ternary_scales(const Inputs& xs, float clip, size_t bucket_size, Output scales) {
    require(bucket_size >= 1, "bucket_size: expected at least 1");
    size_t buckets = 0;
    for (const Input& x : xs) buckets += num_buckets(x.numel, bucket_size);
    require(scales.numel == buckets, "scales: expected one per bucket");
    float* to = scales.data;
    for (const Input& x : xs) {
        segment_scales(x.data, x.numel, clip, bucket_size, to);
        to += num_buckets(x.numel, bucket_size);
    }
}

void ternary_encode(const Inputs& xs, Input scales, Bytes out, const Keys& keys, const Ternary& ternary,
                    const Outputs& residuals) {
    const Layout layout = checked_layout(xs, out.numel, scales.numel, ternary);
    require(keys.size() == xs.size(), "keys: expected one per segment");
    require_fitting(residuals, xs);
    for_each_piece(xs, layout.unit(), [&](size_t s, size_t begin, size_t end) {
        const WordPlace at = layout.places[s];
        float* residual = residuals.empty() ? nullptr : residuals[s].data;
        encode_part(&layout.radix, xs[s].data, scales.data + at.scales, begin, end, residual, Key(keys[s]),
                    out.data + at.words);
    });
}

void ternary_decode_add(Payload payload, Input scales, const Outputs& outs, float weight, const Ternary& ternary) {
    const Layout layout = checked_layout(outs, payload.numel, scales.numel, ternary);
    for_each_piece(outs, layout.unit(), [&](size_t s, size_t begin, size_t end) {
        const WordPlace at = layout.places[s];
        decode_part(&layout.radix, payload.data + at.words, scales.data + at.scales, outs[s].data, begin, end, weight);
    });
}

}  // namespace thinwire
