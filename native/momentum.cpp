// Adds a memory to a gradient, writes the sum to new buffers, and selects its top-k in the same pass. The memory is momentum
// and velocity of Deep Gradient Compression, or error feedback, which has a velocity only.
//
// The pass reads three floats per element and writes two (error feedback: two and one), so memory bandwidth limits it. The
// new buffers are not read again soon: large ones bypass the cache, which saves loading them first. A sample of the new
// velocity gives a threshold. Elements that reach it are collected while they are in registers; the k largest are selected
// among these.
#include <algorithm>
#include <cmath>
#include <functional>

#include "hits.hpp"
#include "reduce.hpp"
#include "streamed.hpp"
#include "threads.hpp"

namespace thinwire {

namespace {

constexpr size_t kLine = 16;  // floats of a cache line
constexpr size_t kMinSampledLines = 64, kMaxSampledLines = 2048;
constexpr size_t kMinCollected = 4096;     // shorter segments are searched as a whole

struct Segment {
    const float *g, *u, *v;
    float *new_u, *new_v;
    size_t numel;
};

// Result of a pass over blocks: positions of new velocities that reach the threshold.
struct Candidates {
    int32_t threshold;
    size_t capacity;
    std::unique_ptr<int32_t[]> indices;
    std::unique_ptr<float[]> values;
    size_t count = 0;
};

template <Rule rule>
THINWIRE_INLINE void step(const Segment& s, const Momentum& m, size_t at, size_t n, float* new_u, float* new_v) {
    constexpr bool nesterov = rule == Rule::nesterov;
    THINWIRE_INDEPENDENT
    for (size_t i = 0; i < n; ++i) {
        const float g = s.g[at + i] * m.factor;
        if constexpr (rule == Rule::feedback) {
            new_v[i] = s.v[at + i] + g;
            continue;
        }
        const float u = nesterov ? (s.u[at + i] + g) * m.momentum : s.u[at + i] * m.momentum + g;
        new_u[i] = u;
        new_v[i] = s.v[at + i] + (nesterov ? u + g : u);
    }
}

THINWIRE_INLINE void collect(const float* x, size_t size, size_t at, Candidates& found) {
    for (uint64_t hits = hits_of_block(x, size, found.threshold); hits && found.count < found.capacity; hits &= hits - 1) {
        const size_t hit = static_cast<size_t>(lowest_bit(hits));
        found.indices[found.count] = static_cast<int32_t>(at + hit);
        found.values[found.count++] = x[hit];
    }
}

template <bool streamed, Rule rule>
THINWIRE_INLINE void pass_block(const Segment& s, const Momentum& m, size_t at, size_t n, Candidates& found) {
    alignas(64) float u[kBlock], v[kBlock];
    step<rule>(s, m, at, n, u, v);
    if (found.capacity && max_magnitude(v, n) >= found.threshold) collect(v, n, at, found);
    if constexpr (rule != Rule::feedback) copy_out(s.new_u + at, u, n, streamed);
    copy_out(s.new_v + at, v, n, streamed);
}

template <bool streamed, Rule rule>
THINWIRE_INLINE void pass(const Segment s, const Momentum m, size_t at, size_t end, Candidates& found) {
    for (; at + kBlock <= end; at += kBlock) pass_block<streamed, rule>(s, m, at, kBlock, found);
    if (at < end) pass_block<streamed, rule>(s, m, at, end - at, found);
    if constexpr (streamed) finish_streams();
}

template <bool streamed>
THINWIRE_INLINE void pass_by_rule(const Segment& s, const Momentum& m, size_t begin, size_t end, Candidates& found) {
    switch (m.rule) {
        case Rule::plain: return pass<streamed, Rule::plain>(s, m, begin, end, found);
        case Rule::nesterov: return pass<streamed, Rule::nesterov>(s, m, begin, end, found);
        case Rule::feedback: return pass<streamed, Rule::feedback>(s, m, begin, end, found);
    }
}

THINWIRE_CLONES void pass_through_cache(const Segment& s, const Momentum& m, size_t begin, size_t end,
                                        Candidates& found) {
    pass_by_rule<false>(s, m, begin, end, found);
}

THINWIRE_CLONES void pass_streamed(const Segment& s, const Momentum& m, size_t begin, size_t end, Candidates& found) {
    pass_by_rule<true>(s, m, begin, end, found);
}

void run(const Segment& s, const Momentum& m, bool large, size_t begin, size_t end, Candidates& found) {
    large ? pass_streamed(s, m, begin, end, found) : pass_through_cache(s, m, begin, end, found);
}

Candidates with_space(int32_t threshold, size_t capacity) {
    if (capacity == 0) return {threshold, 0, nullptr, nullptr};
    return {threshold, capacity, std::unique_ptr<int32_t[]>(new int32_t[capacity]),
            std::unique_ptr<float[]>(new float[capacity])};
}

void append(Candidates& found, const Candidates& more) {
    const size_t count = std::min(more.count, found.capacity - found.count);
    std::copy_n(more.indices.get(), count, found.indices.get() + found.count);
    std::copy_n(more.values.get(), count, found.values.get() + found.count);
    found.count += count;
}

// The whole segment. Each thread collects by itself, in as much space, because the large elements may lie side by side.
void run_all(const Segment& s, const Momentum& m, bool large, Candidates& found) {
    const Ranges ranges = ranges_of(s.numel, kBlock);
    std::vector<Candidates> more;
    for (size_t i = 1; i < ranges.count; ++i) more.push_back(with_space(found.threshold, found.capacity));
    const auto work = [&](size_t i) {
        run(s, m, large, i * ranges.size, std::min(s.numel, (i + 1) * ranges.size), i ? more[i - 1] : found);
    };
    ranges.count > 1 ? run_parallel(ranges.count, work) : work(0);
    for (const Candidates& of_range : more) append(found, of_range);
}

// A threshold that slightly more than k new velocities should reach, and the space for them; no space means no guess.
Candidates guess(const Segment& s, const Momentum& m, size_t k) {
    const size_t lines = s.numel / kLine;
    if (k == 0 || s.numel < kMinCollected) return with_space(0, 0);
    const size_t wanted = std::clamp(lines / 32, kMinSampledLines, kMaxSampledLines);
    const size_t stride = std::max<size_t>(1, (lines / wanted) | 1);
    std::vector<int32_t> sample;
    sample.reserve((lines / stride + 1) * kLine);
    for (size_t line = stride / 2; line < lines; line += stride) {
        float u[kLine], v[kLine];
        if (m.rule == Rule::feedback)
            step<Rule::feedback>(s, m, line * kLine, kLine, u, v);
        else if (m.rule == Rule::nesterov)
            step<Rule::nesterov>(s, m, line * kLine, kLine, u, v);
        else
            step<Rule::plain>(s, m, line * kLine, kLine, u, v);
        for (float x : v) sample.push_back(magnitude(x));
    }
    const double per_sample = static_cast<double>(s.numel) / static_cast<double>(sample.size());
    const double expected = static_cast<double>(k) / per_sample;
    const size_t rank = static_cast<size_t>(expected + 3 * std::sqrt(expected) + 4);
    if (rank >= sample.size()) return with_space(0, 0);
    const auto cut = sample.begin() + static_cast<ptrdiff_t>(rank);
    if (rank < sample.size() / 16)  // few: a heap rejects nearly all others with one comparison each
        std::partial_sort(sample.begin(), cut + 1, sample.end(), std::greater<int32_t>());
    else
        std::nth_element(sample.begin(), cut, sample.end(), std::greater<int32_t>());
    const size_t capacity = std::min(s.numel, static_cast<size_t>(3 * per_sample * (rank + 1)));
    return with_space(sample[rank], capacity);
}

// Exactly the k that `topk` selects in the new velocity: among the candidates if these surely contain them.
void finish(const Segment& s, size_t k, const Candidates& found, int32_t* indices, float* values) {
    if (found.count < k || found.count == found.capacity) {
        topk({{s.new_v, s.numel}}, {static_cast<int64_t>(k)}, {indices, k}, {values, k});
        return;
    }
    topk({{found.values.get(), found.count}}, {static_cast<int64_t>(k)}, {indices, k}, {values, k});
    for (size_t i = 0; i < k; ++i) indices[i] = found.indices[indices[i]];
}

template <typename Buffer>
void check_sizes(const Inputs& gs, const std::vector<Buffer>& buffers) {
    require(buffers.size() == gs.size(), "momentum: expected one buffer of each kind per segment");
    for (size_t i = 0; i < gs.size(); ++i)
        require(buffers[i].numel == gs[i].numel, "momentum: buffers must be of their segment's size");
}

std::vector<Segment> zip(const MomentumBuffers& buffers, Rule rule) {
    const bool has_u = rule != Rule::feedback;
    check_sizes(buffers.gs, buffers.vs);
    check_sizes(buffers.gs, buffers.new_vs);
    if (has_u) check_sizes(buffers.gs, buffers.us), check_sizes(buffers.gs, buffers.new_us);
    std::vector<Segment> segments;
    for (size_t i = 0; i < buffers.gs.size(); ++i)
        segments.push_back({buffers.gs[i].data, has_u ? buffers.us[i].data : nullptr, buffers.vs[i].data,
                            has_u ? buffers.new_us[i].data : nullptr, buffers.new_vs[i].data, buffers.gs[i].numel});
    return segments;
}

}  // namespace

void momentum_correct(const MomentumBuffers& buffers, const Momentum& m) {
    const std::vector<Segment> segments = zip(buffers, m.rule);
    const bool large = is_large(buffers.new_vs);
    for_each_piece(segments, kBlock, [&](size_t s, size_t begin, size_t end) {
        Candidates none = with_space(0, 0);
        run(segments[s], m, large, begin, end, none);
    });
}

void momentum_correct_topk(const MomentumBuffers& buffers, const Momentum& m, const Counts& counts,
                           IndicesOut kept_indices, Output kept_values) {
    int32_t* indices = kept_indices.data;
    float* values = kept_values.data;
    size_t numel = kept_indices.numel;
    require(kept_values.numel == numel, "indices and values: expected the same number of elements");
    const std::vector<Segment> segments = zip(buffers, m.rule);
    require(counts.size() == segments.size(), "counts: expected one per segment");
    for (size_t i = 0; i < segments.size(); ++i) {
        const Segment& s = segments[i];
        require(counts[i] >= 0 && static_cast<size_t>(counts[i]) <= s.numel,
                "counts: expected 0 to the segment's elements");
        const size_t k = static_cast<size_t>(counts[i]);
        require(k <= numel, "indices: fewer than the sum of counts");
        Candidates found = guess(s, m, k);
        run_all(s, m, found.capacity > 0 && is_large(buffers.new_vs), found);
        finish(s, k, found, indices, values);
        indices += k;
        values += k;
        numel -= k;
    }
    require(numel == 0, "indices: more than the sum of counts");
}

void add_topk(const Inputs& gs, const Inputs& es, const Outputs& outs, float factor, const Counts& counts,
              IndicesOut indices, Output values) {
    momentum_correct_topk({gs, {}, es, {}, outs}, {0, factor, Rule::feedback}, counts, indices, values);
}

}  // namespace thinwire
