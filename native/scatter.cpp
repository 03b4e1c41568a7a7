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

// Calls act(element, value) for every selected element of the segments and its place in `values`.
template <typename Segment, typename Value, typename Act>
void for_each(const std::vector<Segment>& outs, const int32_t* indices, Value* values, size_t numel,
              const std::vector<int64_t>& counts, Act act) {
    require(counts.size() == outs.size(), "counts: expected one per segment");
    for (size_t s = 0; s < outs.size(); ++s) {
        require(counts[s] >= 0 && static_cast<size_t>(counts[s]) <= numel, "indices: fewer than the sum of counts");
        const size_t count = static_cast<size_t>(counts[s]);
        require(all_below(indices, count, outs[s].numel), "indices: one lies outside its segment; corrupt payload?");
        for (size_t i = 0; i < count; ++i) act(outs[s].data[indices[i]], values[i]);
        indices += count;
        values += count;
        numel -= count;
    }
    require(numel == 0, "indices: more than the sum of counts");
}

}  // namespace

void scatter(const std::vector<Output>& outs, const int32_t* indices, const float* values, size_t numel,
             const std::vector<int64_t>& counts) {
    for_each(outs, indices, values, numel, counts, [](float& out, float value) { out = value; });
}

void scatter_add(const std::vector<Output>& outs, const int32_t* indices, const float* values, size_t numel,
                 const std::vector<int64_t>& counts, float weight) {
    for_each(outs, indices, values, numel, counts, [weight](float& out, float value) { out += value * weight; });
}

void gather(const std::vector<Input>& xs, const int32_t* indices, float* values, size_t numel,
            const std::vector<int64_t>& counts) {
    for_each(xs, indices, values, numel, counts, [](float x, float& value) { value = x; });
}

}  // namespace thinwire
