// Selection of large magnitudes: all above a threshold, or exactly the k largest.
//
// Exact top-k reads memory about once. A strided sample gives a threshold that is almost surely a little too low. One pass
// collects all elements that reach it, and the k largest are selected among these: in a buffer, or where there are many, in
// the output. If the threshold was too high (fewer
// than k elements reach it) or far too low (they do not fit), a histogram of all magnitudes gives the exact threshold.
#include <algorithm>
#include <cmath>
#include <functional>

#include "compact.hpp"
#include "hits.hpp"
#include "reduce.hpp"
#include "threads.hpp"

namespace thinwire {

namespace {

constexpr size_t kMinSamples = 128, kMaxSamples = 16384;
constexpr uint32_t kBins = 4096;
constexpr size_t kFew = 4096;         // up to this number, selecting directly is faster than a histogram
constexpr size_t kMinSampled = 4096;  // in shorter segments every element is a candidate
constexpr size_t kPiece = 4096;       // collected at a time if the guess was wrong
constexpr size_t kMaxBuffered = 1 << 18;  // with more candidates, new pages for all of them would cost too much

struct Progress {
    size_t at;     // elements read
    size_t count;  // elements collected
};

// Space for the selected elements and one more block, because a block is written before its elements are selected.
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

// Appends elements from `progress.at` on whose magnitude reaches `threshold`; stops when the buffer is full.
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
#ifdef THINWIRE_X86
    if (has_avx512())
        progress.count = compact_avx512(x, n, threshold, progress.at, progress.count, indices, values, capacity);
    else if (has_avx2())
        progress.count = compact_avx2(x, n, threshold, progress.at, progress.count, indices, values, capacity);
#endif
    return collect_plain(x, n, threshold, progress, indices, values, capacity);
}

THINWIRE_CLONES int32_t largest_of(const float* x, size_t n) { return max_magnitude(x, n); }

// The highest bin such that it and all bins above hold k elements; subtracts the elements above it from k.
size_t find_bin(const std::vector<uint32_t>& bins, size_t& k) {
    size_t bin = bins.size() - 1;
    for (; bins[bin] < k; --bin) k -= bins[bin];
    return bin;
}

THINWIRE_INLINE uint32_t count_reaching(const int32_t* magnitudes, size_t count, int32_t threshold) {
    uint32_t reaching = 0;
    for (size_t i = 0; i < count; ++i) reaching += magnitudes[i] >= threshold;
    return reaching;
}

// Bisects the range of the k-th largest: at most 31 vectorised passes over data in the first-level cache.
THINWIRE_CLONES Cut find_cut_of_few(const float* values, size_t count, size_t k, int32_t low, int32_t high) {
    int32_t magnitudes[kFew];
    for (size_t i = 0; i < count; ++i) magnitudes[i] = magnitude(values[i]);
    while (low < high) {
        const int32_t middle = high - (high - low) / 2;
        if (count_reaching(magnitudes, count, middle) >= k)
            low = middle;
        else
            high = middle - 1;
    }
    return {low, low == INT32_MAX ? k : k - count_reaching(magnitudes, count, low + 1)};
}

// Radix selection: counts magnitudes in 4096 bins between `low` and `high`, then inside the bin of the k-th largest, until
// a bin is one magnitude. No magnitude exceeds `high`; at least k reach `low`.
Cut find_cut(const float* values, size_t count, size_t k, int32_t low, int32_t high) {
    if (count <= kFew) return find_cut_of_few(values, count, k, low, high);
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
            return find_cut_of_few(inside.data(), inside.size(), k, low, high);
        }
    }
}

// A threshold that slightly more than k elements should reach, and the space for them; without space there is no guess.
// Slightly fewer than k elements should exceed `high`, and the elements between the two fit into `between`.
struct Guess {
    int32_t threshold;
    size_t capacity;
    int32_t high;
    size_t between;
};

Guess guess_threshold(const float* x, size_t n, size_t k) {
    if (n < kMinSampled) return {0, n, INT32_MAX, n};
    const size_t wanted = std::clamp(n / 128, kMinSamples, kMaxSamples);
    const size_t stride = (n / wanted) | 1;  // odd, so that it visits all columns of a matrix of even width
    std::vector<int32_t> sample;
    sample.reserve(wanted);
    for (size_t at = stride / 2; at < n; at += stride) sample.push_back(magnitude(x[at]));
    const double per_sample = static_cast<double>(n) / static_cast<double>(sample.size());
    const double expected = static_cast<double>(k) / per_sample;
    const double margin = 3 * std::sqrt(expected) + 4;
    const size_t rank = static_cast<size_t>(expected + margin);
    if (rank >= sample.size()) return {0, 0, 0, 0};
    const auto greater = std::greater<int32_t>();
    std::nth_element(sample.begin(), sample.begin() + rank, sample.end(), greater);
    const int32_t low = sample[rank];
    const auto room = [&](double ranks) {
        return std::min(n, static_cast<size_t>(per_sample * (1.25 * ranks + 6 * std::sqrt(ranks))));
    };
    if (expected < margin) return {low, room(rank + 1.0), INT32_MAX, 0};
    const size_t high_rank = static_cast<size_t>(expected - margin);
    std::nth_element(sample.begin(), sample.begin() + high_rank, sample.begin() + rank, greater);
    return {low, room(rank + 1.0), sample[high_rank], room(2 * margin)};
}

// Counts magnitudes above `high` and collects those from `low` to `high`, until the buffer is full.
struct Bracket {
    size_t above, count;
};

THINWIRE_CLONES Bracket bracket_plain(const float* x, size_t n, int32_t low, int32_t high, float* values,
                                      size_t capacity) {
    size_t above = 0, count = 0;
    for (size_t i = 0; i < n && count <= capacity; ++i) {
        const int32_t m = magnitude(x[i]);
        values[count] = x[i];
        count += m >= low && m <= high;
        above += m > high;
    }
    return {above, count};
}

Bracket bracket(const float* x, size_t n, int32_t low, int32_t high, float* values, size_t capacity) {
    Bracket found{0, 0};
    size_t at = 0;
#ifdef THINWIRE_X86
    if (has_avx512()) found.count = bracket_avx512(x, n, low, high, at, found.above, values, capacity);
    else if (has_avx2()) found.count = bracket_avx2(x, n, low, high, at, found.above, values, capacity);
#endif
    if (found.count > capacity) return found;
    const Bracket rest = bracket_plain(x + at, n - at, low, high, values + found.count, capacity - found.count);
    return {found.above + rest.above, found.count + rest.count};
}

// Of `count` collected elements, keeps those above the cut and the first ones equal to it, at most `room` in all.
size_t keep(const int32_t* from_indices, const float* from_values, size_t count, Cut& cut, int32_t* indices,
            float* values, size_t room) {
    size_t kept = 0, i = 0;
#ifdef THINWIRE_X86
    if (has_avx512()) kept = keep_avx512(from_indices, from_values, count, cut, i, indices, values, room);
    else if (has_avx2()) kept = keep_avx2(from_indices, from_values, count, cut, i, indices, values, room);
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

// Whether the k largest all reach `guess`, so that they were collected.
bool topk_by_guess(Input x, size_t k, const Guess& guess, Buffer& buffer, int32_t* indices, float* values) {
    buffer.reserve(guess.capacity);
    const Progress progress = collect(x.data, x.numel, guess.threshold, {0, 0}, buffer.indices.get(),
                                      buffer.values.get(), buffer.capacity);
    if (progress.at < x.numel || progress.count < k) return false;
    const int32_t largest = largest_of(buffer.values.get(), progress.count);
    Cut cut = find_cut(buffer.values.get(), progress.count, k, guess.threshold, largest);
    keep(buffer.indices.get(), buffer.values.get(), progress.count, cut, indices, values, k);
    return true;
}

// For many elements: candidates go to the output, and to the buffer where they no longer fit. Returns whether the guess was
// right.
bool topk_in_place(Input x, size_t k, const Guess& guess, Buffer& buffer, int32_t* indices, float* values) {
    if (guess.between == 0 || k < kBlock) return false;
    const Progress first = collect(x.data, x.numel, guess.threshold, {0, 0}, indices, values, k - kBlock);
    buffer.reserve(std::max(guess.capacity, first.count) - first.count);
    const Progress second = collect(x.data, x.numel, guess.threshold, {first.at, 0}, buffer.indices.get(),
                                    buffer.values.get(), buffer.capacity);
    if (second.at < x.numel || first.count + second.count < k) return false;
    const std::unique_ptr<float[]> near(new float[guess.between + kBlock]);
    const Bracket a = bracket(values, first.count, guess.threshold, guess.high, near.get(), guess.between);
    if (a.count > guess.between) return false;
    const size_t room = guess.between - a.count;
    const Bracket b = bracket(buffer.values.get(), second.count, guess.threshold, guess.high, near.get() + a.count, room);
    const size_t above = a.above + b.above, between = a.count + b.count;
    if (b.count > room || k <= above || k > above + between) return false;
    Cut cut = find_cut(near.get(), between, k - above, guess.threshold, guess.high);
    const size_t kept = keep(indices, values, first.count, cut, indices, values, k);
    keep(buffer.indices.get(), buffer.values.get(), second.count, cut, indices + kept, values + kept, k - kept);
    return true;
}

// What one thread collects of its range, and how much of that belongs to the k largest.
struct Collected {
    Buffer buffer;
    size_t count = 0;
    bool complete = true;
    std::vector<float> near;  // from the guess's threshold to its `high`
    Bracket around{0, 0};
    size_t above = 0, ties = 0, at = 0;  // above the cut, equal to it, and where they go in the output

    void collect_range(const float* x, size_t begin, size_t end, const Guess& guess) {
        buffer.reserve(guess.capacity);  // the large elements may all lie in one range
        const Progress progress =
            collect(x, end, guess.threshold, {begin, 0}, buffer.indices.get(), buffer.values.get(), guess.capacity);
        count = progress.count, complete = progress.at == end && count <= guess.capacity;
        if (!complete) return;
        near.resize(count + kBlock);
        around = bracket(buffer.values.get(), count, guess.threshold, guess.high, near.data(), count);
    }
};

THINWIRE_CLONES void count_around(Collected& part, int32_t threshold) {
    const float* values = part.buffer.values.get();
    size_t above = 0, ties = 0;
    for (size_t i = 0; i < part.count; ++i)
        above += magnitude(values[i]) > threshold, ties += magnitude(values[i]) == threshold;
    part.above = above, part.ties = ties;
}

// By several threads: each collects a range, and copies its share of the k largest to the output. Ties go to the first
// ranges. Returns whether the guess was right.
bool topk_by_ranges(Input x, size_t k, const Guess& guess, Buffer&, int32_t* indices, float* values) {
    const Ranges ranges = ranges_of(x.numel, kBlock);
    std::vector<Collected> parts(ranges.count);
    run_parallel(parts.size(), [&](size_t i) {
        parts[i].collect_range(x.data, i * ranges.size, std::min(x.numel, (i + 1) * ranges.size), guess);
    });
    size_t above = 0;
    std::vector<float> near;
    for (const Collected& part : parts) {
        if (!part.complete) return false;
        above += part.around.above;
        near.insert(near.end(), part.near.begin(), part.near.begin() + static_cast<ptrdiff_t>(part.around.count));
    }
    if (k <= above || k > above + near.size()) return false;
    const Cut cut = find_cut(near.data(), near.size(), k - above, guess.threshold, guess.high);
    run_parallel(parts.size(), [&](size_t i) { count_around(parts[i], cut.threshold); });
    size_t at = 0, ties = cut.ties;
    for (Collected& part : parts) {
        part.at = at, part.ties = std::min(part.ties, ties);
        at += part.above + part.ties, ties -= part.ties;
    }
    run_parallel(parts.size(), [&](size_t i) {
        const Collected& part = parts[i];
        Cut own{cut.threshold, part.ties};
        keep(part.buffer.indices.get(), part.buffer.values.get(), part.count, own, indices + part.at, values + part.at,
             part.above + part.ties);
    });
    return true;
}

void topk_segment(Input x, size_t k, Buffer& buffer, int32_t* indices, float* values) {
    if (k == 0) return;
    const Guess guess = guess_threshold(x.data, x.numel, k);
    const bool fits = guess.capacity <= kMaxBuffered;
    const auto select = splits(x.numel) ? topk_by_ranges : fits ? topk_by_guess : topk_in_place;
    if (guess.capacity > 0 && select(x, k, guess, buffer, indices, values)) return;
    Cut cut = find_cut(x.data, x.numel, k, 0, INT32_MAX);
    buffer.reserve(kMinSampled);
    for (size_t at = 0, kept = 0; at < x.numel && kept < k;) {
        const Progress progress = collect(x.data, x.numel, cut.threshold, {at, 0}, buffer.indices.get(),
                                          buffer.values.get(), std::min(buffer.capacity, kPiece));
        at = progress.at;
        kept += keep(buffer.indices.get(), buffer.values.get(), progress.count, cut, indices + kept, values + kept,
                     k - kept);
    }
}

// Neighbouring chunks are similar: a little less than the last chunk's threshold usually selects few but enough elements.
int32_t topk_of_chunk(Input x, size_t k, int32_t last, Buffer& buffer, int32_t* indices, float* values) {
    if (k == 0) return last;
    const int32_t threshold = magnitude(0.9f * float_from_bits(last));
    const bool found = last > 0 && topk_by_guess(x, k, {threshold, x.numel, 0, 0}, buffer, indices, values);
    if (!found) topk_segment(x, k, buffer, indices, values);
    int32_t least = INT32_MAX;
    for (size_t i = 0; i < k; ++i) least = std::min(least, magnitude(values[i]));
    return least;
}

}  // namespace

void topk(const Inputs& xs, const Counts& counts, IndicesOut kept_indices, Output kept_values) {
    int32_t* indices = kept_indices.data;
    float* values = kept_values.data;
    size_t numel = kept_indices.numel;
    require(kept_values.numel == numel, "indices and values: expected the same number of elements");
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

Selection above(const Inputs& xs, const std::vector<float>& thresholds) {
    require(thresholds.size() == xs.size(), "thresholds: expected one per segment");
    Buffer buffer;
    buffer.reserve(kMinSampled);
    Counts counts;
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

std::vector<float> largest(const Inputs& xs) {
    std::vector<float> magnitudes;
    for (const Input& x : xs) magnitudes.push_back(float_from_bits(largest_of(x.data, x.numel)));
    return magnitudes;
}

void topk_in_chunks(const Inputs& xs, size_t chunk, size_t count, const Counts& last_counts, IndicesOut kept_indices,
                    Output kept_values) {
    int32_t* indices = kept_indices.data;
    float* values = kept_values.data;
    size_t numel = kept_indices.numel;
    require(kept_values.numel == numel, "indices and values: expected the same number of elements");
    require(chunk > 0 && count <= chunk, "count: expected at most the chunk's elements");
    require(last_counts.size() == xs.size(), "last_counts: expected one per segment");
    Buffer buffer;
    for (size_t s = 0; s < xs.size(); ++s) {
        int32_t last = 0;  // the smallest magnitude kept in the previous chunk
        for (size_t at = 0; at < xs[s].numel; at += chunk) {
            const size_t size = std::min(chunk, xs[s].numel - at);
            const size_t kept = size == chunk ? count : static_cast<size_t>(last_counts[s]);
            require(kept <= size && kept <= numel, "indices: fewer than the counts");
            last = topk_of_chunk({xs[s].data + at, size}, kept, last, buffer, indices, values);
            for (size_t i = 0; i < kept; ++i) indices[i] += static_cast<int32_t>(at);
            indices += kept;
            values += kept;
            numel -= kept;
        }
    }
    require(numel == 0, "indices: more than the counts");
}

}  // namespace thinwire
