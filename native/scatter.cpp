// Selected elements out of dense segments, and back into them. Indices may come from the network, so the indices of a
// segment are checked before the segment is touched.
#include "kernels.hpp"
#include "platform.hpp"

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

// Calls act(element, at) for every selected element of the segments and its place among all of them.
template <typename Segment, typename Act>
void for_each(const std::vector<Segment>& outs, Indices indices, size_t num_values, const Counts& counts, Act act) {
    const size_t numel = indices.numel;
    size_t at = 0;
    require(num_values == numel, "indices and values: expected the same number of elements");
    require(counts.size() == outs.size(), "counts: expected one per segment");
    for (size_t s = 0; s < outs.size(); ++s) {
        require(counts[s] >= 0 && static_cast<size_t>(counts[s]) <= numel - at, "indices: fewer than the sum of counts");
        const size_t count = static_cast<size_t>(counts[s]);
        const int32_t* of_segment = indices.data + at;
        require(all_below(of_segment, count, outs[s].numel), "indices: one lies outside its segment; corrupt payload?");
        for (size_t i = 0; i < count; ++i) act(outs[s].data[of_segment[i]], at + i);
        at += count;
    }
    require(at == numel, "indices: more than the sum of counts");
}

}  // namespace

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

}  // namespace thinwire
