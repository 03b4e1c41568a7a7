// Selected elements out of dense segments, and back into them. Indices may come from the network, so the indices of a
// segment are checked before the segment is touched.
#include <algorithm>
#include <limits>

#include "kernels.hpp"
#include "platform.hpp"
#include "reduce.hpp"

namespace thinwire {

namespace {

THINWIRE_CLONES bool all_below(const int32_t* indices, size_t count, size_t numel) {
    uint32_t largest = 0;  // a negative index is a large unsigned one
    for (size_t i = 0; i < count; ++i) {
        const uint32_t index = static_cast<uint32_t>(indices[i]);
        largest = index > largest ? index : largest;
    }
    return count == 0 || largest < numel;
}

// Calls act(segment, indices, count, at) for every segment, its checked indices, and the place of its first value.
template <typename Segment, typename Act>
void for_each_segment(const std::vector<Segment>& outs, Indices indices, size_t num_values, const Counts& counts,
                      Act act) {
    const size_t numel = indices.numel;
    size_t at = 0;
    require(num_values == numel, "indices and values: expected the same number of elements");
    require(counts.size() == outs.size(), "counts: expected one per segment");
    for (size_t s = 0; s < outs.size(); ++s) {
        require(counts[s] >= 0 && static_cast<size_t>(counts[s]) <= numel - at, "indices: fewer than the sum of counts");
        const size_t count = static_cast<size_t>(counts[s]);
        const int32_t* of_segment = indices.data + at;
        require(all_below(of_segment, count, outs[s].numel), "indices: one lies outside its segment; corrupt payload?");
        act(outs[s], of_segment, count, at);
        at += count;
    }
    require(at == numel, "indices: more than the sum of counts");
}

// Calls act(element, at) for every selected element of the segments and its place among all of them.
template <typename Segment, typename Act>
void for_each(const std::vector<Segment>& outs, Indices indices, size_t num_values, const Counts& counts, Act act) {
    for_each_segment(outs, indices, num_values, counts,
                     [=](const Segment& out, const int32_t* of_segment, size_t count, size_t at) {
                         for (size_t i = 0; i < count; ++i) act(out.data[of_segment[i]], at + i);
                     });
}

constexpr size_t kGatherBlock = 4096;  // elements that stay in the first-level cache

// Returns whether the whole segment is finite. Ascending indices find their block in the cache.
THINWIRE_CLONES bool gather_checked(const float* x, size_t n, const int32_t* indices, size_t count, float* values) {
    bool finite = true;
    size_t i = 0;
    for (size_t at = 0; at < n; at += kGatherBlock) {
        const size_t end = std::min(n, at + kGatherBlock);
        finite &= max_magnitude(x + at, end - at) < kInfinityBits;
        for (; i < count && static_cast<size_t>(indices[i]) < end; ++i) values[i] = x[indices[i]];
    }
    return finite;
}

constexpr size_t kBlock = 16384;  // elements that stay in the second-level cache from zeroing to the last payload

// out = weight * the sum of the payloads' elements, block by block. `places[p]` is how far payload p has been read, and
// indices ascend. Returns whether all sums are finite.
bool sum_segment(Output out, std::vector<const int32_t*>& indices, std::vector<const float*>& values,
                 const std::vector<const int32_t*>& ends, float weight) {
    float worst = 0.0f;  // NaN as soon as a sum is infinite or NaN
    for (size_t begin = 0; begin < out.numel; begin += kBlock) {
        const size_t end = std::min(begin + kBlock, out.numel);
        std::fill(out.data + begin, out.data + end, 0.0f);
        for (size_t p = 0; p < indices.size(); ++p) {
            const int32_t* index = indices[p];
            const float* value = values[p];
            for (; index != ends[p] && static_cast<size_t>(*index) < end; ++index, ++value) {
                float& sum = out.data[*index];
                sum += *value * weight;
                worst += sum * 0.0f;
            }
            indices[p] = index, values[p] = value;
        }
    }
    return worst == 0.0f;
}

bool ascends(const int32_t* indices, size_t count) {
    for (size_t i = 1; i < count; ++i)
        if (indices[i] <= indices[i - 1]) return false;
    return true;
}

}  // namespace

bool scatter_total(const Outputs& outs, const std::vector<Indices>& indices, const Inputs& values,
                   const std::vector<Counts>& counts, float weight) {
    const size_t payloads = indices.size();
    require(values.size() == payloads && counts.size() == payloads, "expected indices, values and counts of each payload");
    std::vector<const int32_t*> index_at(payloads), ends(payloads);
    std::vector<const float*> value_at(payloads);
    for (size_t p = 0; p < payloads; ++p) {
        require(values[p].numel == indices[p].numel, "indices and values: expected the same number of elements");
        require(counts[p].size() == outs.size(), "counts: expected one per segment");
        index_at[p] = indices[p].data, value_at[p] = values[p].data;
    }
    bool finite = true;
    for (size_t s = 0; s < outs.size(); ++s) {
        for (size_t p = 0; p < payloads; ++p) {
            const size_t left = static_cast<size_t>(indices[p].data + indices[p].numel - index_at[p]);
            require(counts[p][s] >= 0 && static_cast<size_t>(counts[p][s]) <= left, "indices: fewer than the sum of counts");
            const size_t count = static_cast<size_t>(counts[p][s]);
            ends[p] = index_at[p] + count;
            require(all_below(index_at[p], count, outs[s].numel), "indices: one lies outside its segment; corrupt payload?");
            require(ascends(index_at[p], count), "indices: expected them to ascend strictly; corrupt payload?");
        }
        finite = sum_segment(outs[s], index_at, value_at, ends, weight) && finite;
    }
    for (size_t p = 0; p < payloads; ++p)
        require(index_at[p] == indices[p].data + indices[p].numel, "indices: more than the sum of counts");
    return finite;
}

void scatter_write(const Outputs& outs, Indices indices, Input values, const Counts& counts) {
    for_each(outs, indices, values.numel, counts, [=](float& out, size_t at) { out = values.data[at]; });
}

void scatter_clear(const Outputs& outs, Indices indices, const Counts& counts) {
    for_each(outs, indices, indices.numel, counts, [](float& out, size_t) { out = 0.0f; });
}

void scatter_add(const Outputs& outs, Indices indices, Input values, const Counts& counts, float weight) {
    for_each(outs, indices, values.numel, counts, [=](float& out, size_t at) { out += values.data[at] * weight; });
}

void gather(const Inputs& xs, Indices indices, Output values, const Counts& counts) {
    for_each(xs, indices, values.numel, counts, [=](float x, size_t at) { values.data[at] = x; });
}

void gather_marked(const Inputs& xs, Indices indices, Output values, const Counts& counts) {
    for_each_segment(xs, indices, values.numel, counts,
                     [=](const Input& x, const int32_t* of_segment, size_t count, size_t at) {
                         float* to = values.data + at;
                         const bool finite = gather_checked(x.data, x.numel, of_segment, count, to);
                         if (!finite && count > 0) *to = std::numeric_limits<float>::quiet_NaN();
                     });
}

}  // namespace thinwire
