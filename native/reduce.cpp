// Norms of chunks, all_finite, and the one check that all kernels share.
#include "reduce.hpp"

#include <atomic>
#include <stdexcept>

#include "threads.hpp"

namespace thinwire {

namespace {

constexpr size_t kFiniteBlock = 1 << 14;  // how far to read before looking at the answer

THINWIRE_CLONES bool segment_finite(const float* x, size_t n) {
    for (size_t start = 0; start < n; start += kFiniteBlock)
        if (max_magnitude(x + start, std::min(kFiniteBlock, n - start)) >= kInfinityBits) return false;
    return true;
}

}  // namespace

bool all_finite(const Inputs& xs) {
    std::atomic<bool> finite{true};
    for_each_piece(xs, 1, [&](size_t s, size_t begin, size_t end) {
        if (finite && !segment_finite(xs[s].data + begin, end - begin)) finite = false;
    });
    return finite;
}

void require(bool ok, const char* message) {
    if (!ok) throw std::invalid_argument(message);
}

void require_fitting(const Outputs& residuals, const Inputs& xs) {
    require(residuals.empty() || residuals.size() == xs.size(), "residuals: expected one per segment");
    for (size_t s = 0; s < residuals.size(); ++s)
        require(residuals[s].numel == xs[s].numel, "residuals: expected the segments' sizes");
}

namespace {

THINWIRE_CLONES double chunk_norm(const float* x, size_t n) { return tree_sum<Term::kMagnitude>(x, n); }

}  // namespace

void chunk_norms(const Inputs& xs, size_t chunk, Output norms) {
    require(chunk > 0, "chunk: expected at least 1");
    float* out = norms.data;
    size_t out_numel = norms.numel;
    for (const Input& x : xs) {
        for (size_t at = 0; at < x.numel; at += chunk) {
            require(out_numel-- > 0, "out: fewer than the chunks");
            *out++ = static_cast<float>(chunk_norm(x.data + at, std::min(chunk, x.numel - at)));
        }
    }
    require(out_numel == 0, "out: more than the chunks");
}

}  // namespace thinwire
