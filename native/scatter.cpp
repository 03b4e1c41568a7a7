// Selected elements out of dense segments, and back into them. Indices may come off the wire: a segment's are checked
// before it is touched.
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
void for_each(const std::vector<Segment>& outs, const int32_t* indices, size_t numel,
              const std::vector<int64_t>& counts, Act act) {
    size_t at = 0;
    require(counts.size() == outs.size(), "counts: expected one per segment");
    for (size_t s = 0; s < outs.size(); ++s) {
        require(counts[s] >= 0 && static_cast<size_t>(counts[s]) <= numel - at, "indices: fewer than the sum of counts");
        const size_t count = static_cast<size_t>(counts[s]);
        const int32_t* of_segment = indices + at;
        require(all_below(of_segment, count, outs[s].numel), "indices: one lies outside its segment; corrupt payload?");
        for (size_t i = 0; i < count; ++i) act(outs[s].data[of_segment[i]], at + i);
        at += count;
    }
    require(at == numel, "indices: more than the sum of counts");
}

}  // namespace

void scatter(const std::vector<Output>& outs, const int32_t* indices, const float* values, size_t numel,
             const std::vector<int64_t>& counts) {
    for_each(outs, indices, numel, counts, [=](float& out, size_t at) { out = values[at]; });
}

void clear(const std::vector<Output>& outs, const int32_t* indices, size_t numel, const std::vector<int64_t>& counts) {
    for_each(outs, indices, numel, counts, [](float& out, size_t) { out = 0.0f; });
}

void scatter_add(const std::vector<Output>& outs, const int32_t* indices, const float* values, size_t numel,
                 const std::vector<int64_t>& counts, float weight) {
    for_each(outs, indices, numel, counts, [=](float& out, size_t at) { out += values[at] * weight; });
}

void gather(const std::vector<Input>& xs, const int32_t* indices, float* values, size_t numel,
            const std::vector<int64_t>& counts) {
    for_each(xs, indices, numel, counts, [=](float x, size_t at) { values[at] = x; });
}

}  // namespace thinwire
