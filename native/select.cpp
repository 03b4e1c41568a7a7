// Selection of large magnitudes: all above a threshold, or exactly the k largest.
//
// Exact top-k reads memory about once: a strided sample guesses a threshold that is almost surely a little too low, one
// pass collects what reaches it, and the answer is found among those. Where the guess was too high (fewer than k
// reached it) or far too low (they do not fit), all elements are counted by magnitude to find the exact threshold.
#include <algorithm>
#include <cmath>
#include <functional>

#include "compact.hpp"
#include "hits.hpp"
#include "kernels.hpp"
#include "reduce.hpp"

namespace thinwire {

namespace {

constexpr size_t kMinSamples = 128, kMaxSamples = 16384;
constexpr uint32_t kBins = 4096;
constexpr size_t kFew = 4096;         // so many are sorted out faster than counted in bins
constexpr size_t kMinSampled = 4096;  // shorter segments are all candidates

struct Progress {
    size_t at;     // elements read
    size_t count;  // elements collected
};

// Room for selected elements, and a block more, since a block is written before it is known what stays.
struct Buffer {
    size_t capacity = 0;
    std::unique_ptr<int32_t[]> indices;
    std::unique_ptr<float[]> values;

    void reserve(size_t wanted, size_t used = 0) {
        if (wanted <= capacity) return;
        Buffer larger;
        larger.indices.reset(new int32_t[wanted + kBlock]);  // left uninitialised
        larger.values.reset(new float[wanted + kBlock]);
        std::copy_n(indices.get(), used, larger.indices.get());
        std::copy_n(values.get(), used, larger.values.get());
        larger.capacity = wanted;
        *this = std::move(larger);
    }
};

// Appends elements whose magnitude reaches `threshold`, from `progress.at` on; stops early when the buffer is full.
THINWIRE_CLONES Progress collect_plain(const float* x, size_t n, int32_t threshold, Progress progress,
                                       int32_t* indices, float* values, size_t capacity) {
    size_t at = progress.at, count = progress.count;
    while (at < n && count <= capacity) {
        const size_t size = std::min(kBlock, n - at);
        const int32_t largest = size == kBlock ? max_magnitude(x + at, kBlock) : max_magnitude(x + at, size);
        if (largest >= threshold) {
            for (uint64_t hits = hits_of_block(x + at, size, threshold); hits; hits &= hits - 1) {
                const size_t hit = at + static_cast<size_t>(lowest_bit(hits));
                indices[count] = static_cast<int32_t>(hit);
                values[count++] = x[hit];
            }
        }
        at += size;
    }
    return {at, count};
}

Progress collect(const float* x, size_t n, int32_t threshold, Progress progress, int32_t* indices, float* values,
                 size_t capacity) {
#ifdef THINWIRE_HAS_AVX512
    if (has_avx512())
        progress.count = compact_avx512(x, n, threshold, progress.at, progress.count, indices, values, capacity);
#endif
    return collect_plain(x, n, threshold, progress, indices, values, capacity);
}

THINWIRE_CLONES int32_t largest_of(const float* x, size_t n) { return max_magnitude(x, n); }

// The highest bin that, with all bins above it, holds k; reduces k to what is left for that bin.
size_t find_bin(const std::vector<uint32_t>& bins, size_t& k) {
    size_t bin = bins.size() - 1;
    for (; bins[bin] < k; --bin) k -= bins[bin];
    return bin;
}

Cut find_cut_of_few(const float* values, size_t count, size_t k) {
    int32_t magnitudes[kFew];
    for (size_t i = 0; i < count; ++i) magnitudes[i] = magnitude(values[i]);
    std::nth_element(magnitudes, magnitudes + k - 1, magnitudes + count, std::greater<int32_t>());
    const int32_t threshold = magnitudes[k - 1];
    size_t above = 0;
    for (size_t i = 0; i < k; ++i) above += magnitudes[i] > threshold;
    return {threshold, k - above};
}

// Radix selection: counts magnitudes in 4096 bins between `low` and `high`, and again inside the bin that holds the
// k-th largest, until a bin is one magnitude. No magnitude exceeds `high`, at least k reach `low`.
Cut find_cut(const float* values, size_t count, size_t k, int32_t low, int32_t high) {
    if (count <= kFew) return find_cut_of_few(values, count, k);
    std::vector<uint32_t> bins;
    std::vector<float> inside;
    for (;;) {
        const uint32_t span = static_cast<uint32_t>(high - low);
        int shift = 0;
        while (span >> shift >= kBins) ++shift;
        bins.assign(kBins, 0);
        for (size_t i = 0; i < count; ++i) {
            const uint32_t above = static_cast<uint32_t>(magnitude(values[i])) - static_cast<uint32_t>(low);
            if (above <= span) ++bins[above >> shift];
        }
        const size_t bin = find_bin(bins, k);
        low += static_cast<int32_t>(bin << shift);
        if (shift == 0) return {low, k};
        high = std::min<int64_t>(high, int64_t{low} + (int64_t{1} << shift) - 1);
        if (bins[bin] <= kFew) {
            inside.reserve(kFew);
            for (size_t i = 0; i < count; ++i)
                if (magnitude(values[i]) >= low && magnitude(values[i]) <= high) inside.push_back(values[i]);
            return find_cut_of_few(inside.data(), inside.size(), k);
        }
    }
}

// A threshold that somewhat more than k elements should reach, and room for them; no room means no guess.
struct Guess {
    int32_t threshold;
    size_t capacity;
};

Guess guess_threshold(const float* x, size_t n, size_t k) {
    if (n < kMinSampled) return {0, n};
    const size_t wanted = std::clamp(n / 128, kMinSamples, kMaxSamples);
    const size_t stride = (n / wanted) | 1;  // odd, so that it walks through all columns of a matrix of even width
    std::vector<int32_t> sample;
    sample.reserve(wanted);
    for (size_t at = stride / 2; at < n; at += stride) sample.push_back(magnitude(x[at]));
    const double per_sample = static_cast<double>(n) / static_cast<double>(sample.size());
    const double expected = static_cast<double>(k) / per_sample;
    const size_t rank = static_cast<size_t>(expected + 3 * std::sqrt(expected) + 4);
    if (rank >= sample.size()) return {0, 0};
    std::nth_element(sample.begin(), sample.begin() + rank, sample.end(), std::greater<int32_t>());
    return {sample[rank], std::min(n, static_cast<size_t>(per_sample * (1.25 * (rank + 1) + 6 * std::sqrt(rank + 1.0))))};
}

// Keeps of `count` collected elements those above the cut, and the first that equal it, at most `room`.
size_t keep(const int32_t* from_indices, const float* from_values, size_t count, Cut& cut, int32_t* indices,
            float* values, size_t room) {
    size_t kept = 0, i = 0;
#ifdef THINWIRE_HAS_AVX512
    if (has_avx512()) kept = keep_avx512(from_indices, from_values, count, cut, i, indices, values, room);
#else
    (void)room;
#endif
    for (; i < count; ++i) {
        const int32_t m = magnitude(from_values[i]);
        if (m < cut.threshold || (m == cut.threshold && cut.ties == 0)) continue;
        cut.ties -= m == cut.threshold;
        indices[kept] = from_indices[i];
        values[kept++] = from_values[i];
    }
    return kept;
}

void topk_segment(Input x, size_t k, Buffer& buffer, int32_t* indices, float* values) {
    if (k == 0) return;
    const Guess guess = guess_threshold(x.data, x.numel, k);
    buffer.reserve(guess.capacity);
    Progress progress{0, 0};
    if (guess.capacity > 0)
        progress = collect(x.data, x.numel, guess.threshold, progress, buffer.indices.get(), buffer.values.get(),
                           buffer.capacity);
    if (progress.at == x.numel && progress.count >= k) {
        const int32_t largest = largest_of(buffer.values.get(), progress.count);
        Cut cut = find_cut(buffer.values.get(), progress.count, k, guess.threshold, largest);
        keep(buffer.indices.get(), buffer.values.get(), progress.count, cut, indices, values, k);
        return;
    }
    Cut cut = find_cut(x.data, x.numel, k, 0, INT32_MAX);
    buffer.reserve(kMinSampled);
    for (size_t at = 0, kept = 0; at < x.numel && kept < k;) {
        progress = collect(x.data, x.numel, cut.threshold, {at, 0}, buffer.indices.get(), buffer.values.get(),
                           buffer.capacity);
        at = progress.at;
        kept += keep(buffer.indices.get(), buffer.values.get(), progress.count, cut, indices + kept, values + kept,
                     k - kept);
    }
}

}  // namespace

void topk(const std::vector<Input>& xs, const std::vector<int64_t>& counts, int32_t* indices, float* values,
          size_t numel) {
    require(counts.size() == xs.size(), "counts: expected one per segment");
    Buffer buffer;
    for (size_t s = 0; s < xs.size(); ++s) {
        require(counts[s] >= 0 && static_cast<size_t>(counts[s]) <= xs[s].numel,
                "counts: expected 0 to the segment's elements");
        const size_t count = static_cast<size_t>(counts[s]);
        require(count <= numel, "indices: fewer than the sum of counts");
        topk_segment(xs[s], count, buffer, indices, values);
        indices += count;
        values += count;
        numel -= count;
    }
    require(numel == 0, "indices: more than the sum of counts");
}

Selection select(const std::vector<Input>& xs, const std::vector<float>& thresholds) {
    require(thresholds.size() == xs.size(), "thresholds: expected one per segment");
    Buffer buffer;
    buffer.reserve(kMinSampled);
    std::vector<int64_t> counts;
    size_t total = 0;
    for (size_t s = 0; s < xs.size(); ++s) {
        Progress progress{0, total};
        for (;;) {
            progress = collect(xs[s].data, xs[s].numel, magnitude(thresholds[s]), progress, buffer.indices.get(),
                               buffer.values.get(), buffer.capacity);
            if (progress.at == xs[s].numel && progress.count <= buffer.capacity) break;
            buffer.reserve(2 * progress.count, progress.count);
        }
        counts.push_back(static_cast<int64_t>(progress.count - total));
        total = progress.count;
    }
    return {std::move(counts), std::move(buffer.indices), std::move(buffer.values), total};
}

std::vector<float> largest(const std::vector<Input>& xs) {
    std::vector<float> magnitudes;
    for (const Input& x : xs) magnitudes.push_back(float_from_bits(largest_of(x.data, x.numel)));
    return magnitudes;
}

void topk_in_chunks(const std::vector<Input>& xs, size_t chunk, size_t count, const std::vector<int64_t>& last_counts,
                    int32_t* indices, float* values, size_t numel) {
    require(chunk > 0 && count <= chunk, "count: expected at most the chunk's elements");
    require(last_counts.size() == xs.size(), "last_counts: expected one per segment");
    Buffer buffer;
    for (size_t s = 0; s < xs.size(); ++s) {
        for (size_t at = 0; at < xs[s].numel; at += chunk) {
            const size_t size = std::min(chunk, xs[s].numel - at);
            const size_t kept = size == chunk ? count : static_cast<size_t>(last_counts[s]);
            require(kept <= size && kept <= numel, "indices: fewer than the counts");
            topk_segment({xs[s].data + at, size}, kept, buffer, indices, values);
            for (size_t i = 0; i < kept; ++i) indices[i] += static_cast<int32_t>(at);
            indices += kept;
            values += kept;
            numel -= kept;
        }
    }
    require(numel == 0, "indices: more than the counts");
}

}  // namespace thinwire
