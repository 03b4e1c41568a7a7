// Products of matrices with a few vectors, and updates of low rank: each matrix is read, or read and written, once.
// Factors lie vector by vector: `rank` vectors of the rows' number (n) or of the columns' (m).
#include <algorithm>

#include "kernels.hpp"
#include "platform.hpp"

namespace thinwire {

namespace {

constexpr size_t kRows = 8, kColumns = 2048;  // a block of rows stays in the second-level cache for all vectors
constexpr size_t kLanes = 32;

// out[j] += sum_i p[i] x[i, j] over kRows rows that are `stride` apart.
THINWIRE_INLINE void add_rows(const float* x, size_t stride, const float* p, float* out, size_t width) {
    const float *x0 = x, *x1 = x0 + stride, *x2 = x1 + stride, *x3 = x2 + stride;
    const float *x4 = x3 + stride, *x5 = x4 + stride, *x6 = x5 + stride, *x7 = x6 + stride;
    const float p0 = p[0], p1 = p[1], p2 = p[2], p3 = p[3], p4 = p[4], p5 = p[5], p6 = p[6], p7 = p[7];
    THINWIRE_INDEPENDENT
    for (size_t j = 0; j < width; ++j)
        out[j] += ((p0 * x0[j] + p1 * x1[j]) + (p2 * x2[j] + p3 * x3[j])) +
                  ((p4 * x4[j] + p5 * x5[j]) + (p6 * x6[j] + p7 * x7[j]));
}

THINWIRE_INLINE void add_row(const float* x, float p, float* out, size_t width) {
    THINWIRE_INDEPENDENT
    for (size_t j = 0; j < width; ++j) out[j] += p * x[j];
}

// out (rank, m) = p (rank, n) times x (n, m).
THINWIRE_CLONES void left_products(const float* x, size_t n, size_t m, const float* p, size_t rank, float* out) {
    std::fill(out, out + rank * m, 0.0f);
    for (size_t at = 0; at < m; at += kColumns) {
        const size_t width = std::min(kColumns, m - at);
        size_t i = 0;
        for (; i + kRows <= n; i += kRows)
            for (size_t r = 0; r < rank; ++r) add_rows(x + i * m + at, m, p + r * n + i, out + r * m + at, width);
        for (; i < n; ++i)
            for (size_t r = 0; r < rank; ++r) add_row(x + i * m + at, p[r * n + i], out + r * m + at, width);
    }
}

THINWIRE_INLINE float dot(const float* x, const float* y, size_t n) {
    float lanes[kLanes] = {};
    size_t i = 0;
    for (; i + kLanes <= n; i += kLanes)
        for (size_t lane = 0; lane < kLanes; ++lane) lanes[lane] += x[i + lane] * y[i + lane];
    for (size_t lane = 0; i + lane < n; ++lane) lanes[lane] += x[i + lane] * y[i + lane];
    for (size_t half = kLanes / 2; half > 0; half /= 2)
        for (size_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    return lanes[0];
}

// out (rank, n) = p (rank, m) times x (n, m) transposed.
THINWIRE_CLONES void right_products(const float* x, size_t n, size_t m, const float* p, size_t rank, float* out) {
    for (size_t i = 0; i < n; ++i)
        for (size_t r = 0; r < rank; ++r) out[r * n + i] = dot(x + i * m, p + r * m, m);
}

// x (n, m) += a (rank, n) transposed times b (rank, m).
THINWIRE_CLONES void add_factors(float* x, size_t n, size_t m, const float* a, const float* b, size_t rank) {
    float sum[kColumns];
    for (size_t at = 0; at < m; at += kColumns) {
        const size_t width = std::min(kColumns, m - at);
        for (size_t i = 0; i < n; ++i) {
            float* row = x + i * m + at;
            if (rank == 1) {
                add_row(b + at, a[i], row, width);
                continue;
            }
            for (size_t j = 0; j < width; ++j) sum[j] = a[i] * b[at + j];
            for (size_t r = 1; r < rank; ++r) add_row(b + r * m + at, a[r * n + i], sum, width);
            THINWIRE_INDEPENDENT
            for (size_t j = 0; j < width; ++j) row[j] += sum[j];
        }
    }
}

struct Shape {
    size_t n, m;
};

Shape shape_of(size_t numel, int64_t rows) {
    require(rows > 0 && numel % static_cast<size_t>(rows) == 0 && numel > 0, "rows: expected to divide the elements");
    return {static_cast<size_t>(rows), numel / static_cast<size_t>(rows)};
}

}  // namespace

void low_rank_products(const Inputs& xs, const Counts& rows, const Inputs& ps, bool left, const Outputs& outs) {
    require(rows.size() == xs.size() && ps.size() == xs.size() && outs.size() == xs.size(), "expected one per matrix");
    for (size_t i = 0; i < xs.size(); ++i) {
        const auto [n, m] = shape_of(xs[i].numel, rows[i]);
        const size_t side = left ? n : m, rank = ps[i].numel / side;
        require(rank > 0 && ps[i].numel == rank * side, "ps: expected whole vectors of the side that is multiplied");
        require(outs[i].numel == rank * (left ? m : n), "outs: expected whole vectors of the other side");
        (left ? left_products : right_products)(xs[i].data, n, m, ps[i].data, rank, outs[i].data);
    }
}

void low_rank_add(const Outputs& xs, const Counts& rows, const Inputs& as, const Inputs& bs) {
    require(rows.size() == xs.size() && as.size() == xs.size() && bs.size() == xs.size(), "expected one per matrix");
    for (size_t i = 0; i < xs.size(); ++i) {
        const auto [n, m] = shape_of(xs[i].numel, rows[i]);
        const size_t rank = as[i].numel / n;
        require(rank > 0 && as[i].numel == rank * n && bs[i].numel == rank * m, "factors: expected as many vectors");
        add_factors(xs[i].data, n, m, as[i].data, bs[i].data, rank);
    }
}

}  // namespace thinwire
