// The weighted differences to other workers' values, added to values as they are now, and checked, in one pass.
#include "kernels.hpp"
#include "reduce.hpp"

namespace thinwire {

namespace {

constexpr size_t kBlock = 2048;  // elements whose change stays in the first-level cache

struct Differences {
    const float* own;
    const std::vector<const float*>& theirs;
    const std::vector<float>& weights;
    float own_weight;
};

// Element `at` of the vectors is element 0 of `out`.
THINWIRE_CLONES bool add_differences(const Differences& d, size_t at, float* out, size_t n) {
    float change[kBlock];
    int32_t largest = 0;
    for (size_t start = 0; start < n; start += kBlock) {
        const size_t size = std::min(kBlock, n - start);
        const float* own = d.own + at + start;
        for (size_t i = 0; i < size; ++i) change[i] = own[i] * d.own_weight;
        for (size_t k = 0; k < d.theirs.size(); ++k) {
            const float *theirs = d.theirs[k] + at + start, weight = d.weights[k];
            for (size_t i = 0; i < size; ++i) change[i] += (theirs[i] - own[i]) * weight;
        }
        largest = std::max(largest, max_magnitude(change, size));
        for (size_t i = 0; i < size; ++i) out[start + i] += change[i];
    }
    return largest < kInfinityBits;
}

}  // namespace

bool mix_add(const Outputs& outs, Input own, const Inputs& theirs, const std::vector<float>& weights,
             float own_weight) {
    size_t numel = 0;
    for (const Output& out : outs) numel += out.numel;
    require(own.numel == numel, "own: expected the segments' elements");
    require(theirs.size() == weights.size(), "weights: expected one per vector");
    std::vector<const float*> vectors;
    for (const Input& x : theirs) {
        require(x.numel == numel, "theirs: expected the segments' elements");
        vectors.push_back(x.data);
    }
    bool finite = true;
    size_t at = 0;
    for (const Output& out : outs) {
        finite &= add_differences({own.data, vectors, weights, own_weight}, at, out.data, out.numel);
        at += out.numel;
    }
    return finite;
}

}  // namespace thinwire
