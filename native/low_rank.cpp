// Products of matrices with a few vectors, and updates of low rank: each matrix is read, or read and written, once.
// Factors lie vector by vector: `rank` vectors of the rows' number (n) or of the columns' (m).
#include <algorithm>
#include <cmath>

#include "kernels.hpp"
#include "reduce.hpp"
#include "streamed.hpp"

namespace thinwire {

namespace {

constexpr size_t kRows = 8, kColumns = 2048;  // a block of rows stays in the second-level cache for all vectors
constexpr size_t kLanes = 32, kPiece = 1024;

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

// Sums of products with one or two vectors, in lanes that are added up at the end.
struct Lanes {
    float of_first[kLanes] = {}, of_second[kLanes] = {};
};

// `n` is a multiple of kLanes, but for the last call.
template <bool both>
THINWIRE_INLINE Lanes with_dots(Lanes lanes, const float* x, const float* y, const float* z, size_t n) {
    size_t i = 0;
    for (; i + kLanes <= n; i += kLanes)
        for (size_t lane = 0; lane < kLanes; ++lane) {
            lanes.of_first[lane] += x[i + lane] * y[i + lane];
            if (both) lanes.of_second[lane] += x[i + lane] * z[i + lane];
        }
    for (size_t lane = 0; i + lane < n; ++lane) {
        lanes.of_first[lane] += x[i + lane] * y[i + lane];
        if (both) lanes.of_second[lane] += x[i + lane] * z[i + lane];
    }
    return lanes;
}

THINWIRE_INLINE float halved(float* lanes) {
    for (size_t half = kLanes / 2; half > 0; half /= 2)
        for (size_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    return lanes[0];
}

// Products of up to kRows rows with one or two vectors, in pieces of columns, so that the vectors' pieces stay in the
// first-level cache.
template <bool both>
THINWIRE_INLINE void dot_rows(const float* x, size_t rows, size_t m, const float* p, float* out, size_t stride) {
    Lanes lanes[kRows];
    for (size_t at = 0; at < m; at += kPiece) {
        const float *y = p + at, *z = both ? y + m : y;
        const size_t width = std::min(kPiece, m - at);
        for (size_t i = 0; i < rows; ++i) lanes[i] = with_dots<both>(lanes[i], x + i * m + at, y, z, width);
    }
    for (size_t i = 0; i < rows; ++i) {
        out[i] = halved(lanes[i].of_first);
        if (both) out[stride + i] = halved(lanes[i].of_second);
    }
}

THINWIRE_INLINE void row_products(const float* x, size_t rows, size_t m, const float* p, size_t rank, float* out,
                                  size_t stride) {
    size_t r = 0;
    for (; r + 2 <= rank; r += 2) dot_rows<true>(x, rows, m, p + r * m, out + r * stride, stride);
    if (r < rank) dot_rows<false>(x, rows, m, p + r * m, out + r * stride, stride);
}

// out (rank, n) = p (rank, m) times x (n, m) transposed.
THINWIRE_CLONES void right_products(const float* x, size_t n, size_t m, const float* p, size_t rank, float* out) {
    for (size_t i = 0; i < n; i += kRows) row_products(x + i * m, std::min(kRows, n - i), m, p, rank, out + i, n);
}

// A matrix (n, m) and what is added to it.
struct Sum {
    const float *g, *e;
    float factor;
    float* x;
    size_t n, m;
};

// x = e + factor g, and out (rank, n) = p (rank, m) times x transposed. `block` has room for kRows rows.
THINWIRE_CLONES void sum_and_products(const Sum* sum, const float* p, size_t rank, float* block, bool large, float* out) {
    const Sum s = *sum;
    for (size_t i = 0; i < s.n; i += kRows) {
        const size_t rows = std::min(kRows, s.n - i), numel = rows * s.m;
        const float *g = s.g + i * s.m, *e = s.e + i * s.m;
        THINWIRE_INDEPENDENT
        for (size_t j = 0; j < numel; ++j) block[j] = e[j] + g[j] * s.factor;
        row_products(block, rows, s.m, p, rank, out + i, s.n);
        copy_out(s.x + i * s.m, block, numel, large);
    }
}

// sum = a[0] b[0] + a[1] b[1] + ..., `count` vectors; unless `first`, added to what was there.
template <int count, bool first>
THINWIRE_INLINE void add_vectors(const float* a, size_t n, const float* b, size_t m, float* sum, size_t width) {
    const float a0 = a[0], a1 = count > 1 ? a[n] : 0, a2 = count > 2 ? a[2 * n] : 0, a3 = count > 3 ? a[3 * n] : 0;
    const float *b0 = b, *b1 = b + m, *b2 = b1 + m, *b3 = b2 + m;
    THINWIRE_INDEPENDENT
    for (size_t j = 0; j < width; ++j) {
        float total = first ? a0 * b0[j] : sum[j] + a0 * b0[j];
        if (count > 1) total += a1 * b1[j];
        if (count > 2) total += a2 * b2[j];
        if (count > 3) total += a3 * b3[j];
        sum[j] = total;
    }
}

template <bool first>
THINWIRE_INLINE void add_few(const float* a, size_t n, const float* b, size_t m, size_t count, float* sum, size_t width) {
    if (count >= 4) return add_vectors<4, first>(a, n, b, m, sum, width);
    if (count == 3) return add_vectors<3, first>(a, n, b, m, sum, width);
    if (count == 2) return add_vectors<2, first>(a, n, b, m, sum, width);
    add_vectors<1, first>(a, n, b, m, sum, width);
}

// A part of a row of the product: a, one float each `n`, times b, `rank` vectors each `m`.
THINWIRE_INLINE void product_row(const float* a, size_t n, const float* b, size_t m, size_t rank, float* sum, size_t width) {
    add_few<true>(a, n, b, m, rank, sum, width);
    for (size_t r = 4; r < rank; r += 4) add_few<false>(a + r * n, n, b + r * m, m, rank - r, sum, width);
}

// So many columns of the second factor stay in the first-level cache.
THINWIRE_INLINE size_t columns_of(size_t rank) { return std::max(kColumns / 16, std::min(kColumns, 4 * kColumns / rank)); }

// x (n, m) += a (rank, n) transposed times b (rank, m).
THINWIRE_CLONES void add_factors(float* x, size_t n, size_t m, const float* a, const float* b, size_t rank) {
    alignas(64) float sum[kColumns];
    const size_t columns = columns_of(rank);
    for (size_t at = 0; at < m; at += columns) {
        const size_t width = std::min(columns, m - at);
        for (size_t i = 0; i < n; ++i) {
            float* row = x + i * m + at;
            if (rank == 1) {
                add_row(b + at, a[i], row, width);
                continue;
            }
            prefetch(row + m, i + 1 < n ? width : 0);
            product_row(a + i, n, b + at, m, rank, sum, width);
            THINWIRE_INDEPENDENT
            for (size_t j = 0; j < width; ++j) row[j] += sum[j];
        }
    }
}

// x (n, m) = a (rank, n) transposed times b (rank, m); returns the largest magnitude.
THINWIRE_CLONES int32_t store_factors(float* x, size_t n, size_t m, const float* a, const float* b, size_t rank,
                                      bool large) {
    alignas(64) float sum[kColumns];
    const size_t columns = columns_of(rank);
    int32_t largest = 0;
    for (size_t at = 0; at < m; at += columns) {
        const size_t width = std::min(columns, m - at);
        for (size_t i = 0; i < n; ++i) {
            product_row(a + i, n, b + at, m, rank, sum, width);
            largest = std::max(largest, max_magnitude(sum, width));
            copy_out(x + i * m + at, sum, width, large);
        }
    }
    return largest;
}

THINWIRE_INLINE double block_dot(const double* x, const double* y, size_t n) {
    double lanes[kSumLanes] = {};
    size_t i = 0;
    for (; i + kSumLanes <= n; i += kSumLanes)
        for (size_t lane = 0; lane < kSumLanes; ++lane) lanes[lane] += x[i + lane] * y[i + lane];
    for (size_t lane = 0; i + lane < n; ++lane) lanes[lane] += x[i + lane] * y[i + lane];
    return halve(lanes, kSumLanes);
}

// <x, y>, summed as by `tree_sum`.
THINWIRE_INLINE double dot(const double* x, const double* y, size_t n) {
    std::vector<double> sums;
    for (size_t at = 0; at < n; at += kSumBlock)
        sums.push_back(block_dot(x + at, y + at, std::min(kSumBlock, n - at)));
    return sum_of_blocks(sums);
}

// y <- y - factor <v, y> v
THINWIRE_INLINE void reflect(const double* v, double factor, double* y, size_t n) {
    const double share = factor * dot(v, y, n);
    THINWIRE_INDEPENDENT
    for (size_t i = 0; i < n; ++i) y[i] -= share * v[i];
}

// xs, vectors of n numbers, as columns are Q R, where the diagonal of R is not negative. Writes the first `count` columns
// of Q, by Householder reflections. Vector j becomes v of reflection j, 1 - factors[j] v v'; it begins with j zeros.
// `signs` has room for `count` numbers and `x` for n.
THINWIRE_CLONES void orthonormalise(double* xs, size_t count, size_t n, double* factors, double* signs, double* x,
                                    float* out) {
    for (size_t j = 0; j < count; ++j) {
        double* v = xs + j * n;
        for (size_t i = 0; i < j; ++i) reflect(xs + i * n, factors[i], v, n);
        const double first = v[j];
        std::fill(v, v + j + 1, 0.0);
        const double rest = dot(v, v, n);
        signs[j] = first < 0 ? -1.0 : 1.0;
        if (rest == 0.0) {
            factors[j] = 0.0 * first;  // NaN if `first` is infinite
        } else {
            signs[j] = -signs[j];  // so that the subtraction below does not cancel
            const double turned = signs[j] * std::sqrt(first * first + rest);
            factors[j] = (turned - first) / turned;
            for (size_t i = 0; i < n; ++i) v[i] /= first - turned;
        }
        v[j] = 1.0;
    }
    for (size_t j = 0; j < count; ++j) {
        std::fill(x, x + n, 0.0);
        x[j] = signs[j];
        for (size_t i = j + 1; i-- > 0;) reflect(xs + i * n, factors[i], x, n);
        for (size_t i = 0; i < n; ++i) out[j * n + i] = static_cast<float>(x[i]);
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

void low_rank_add_products(const Inputs& gs, const Inputs& es, float factor, const Counts& rows, const Inputs& ps,
                           const Outputs& xs, const Outputs& outs) {
    const size_t count = xs.size();
    require(gs.size() == count && es.size() == count && rows.size() == count, "expected one per matrix");
    require(ps.size() == count && outs.size() == count, "expected one per matrix");
    const bool large = is_large(xs);
    std::vector<float> block;
    for (size_t i = 0; i < count; ++i) {
        const auto [n, m] = shape_of(xs[i].numel, rows[i]);
        const size_t rank = ps[i].numel / m;
        require(gs[i].numel == n * m && es[i].numel == n * m, "gs, es: expected the elements of xs");
        require(rank > 0 && ps[i].numel == rank * m, "ps: expected whole vectors of the columns' size");
        require(outs[i].numel == rank * n, "outs: expected whole vectors of the rows' size");
        if (block.size() < kRows * m) block.resize(kRows * m);
        const Sum sum{gs[i].data, es[i].data, factor, xs[i].data, n, m};
        sum_and_products(&sum, ps[i].data, rank, block.data(), large, outs[i].data);
    }
    if (large) finish_streams();
}

bool low_rank_store(const Outputs& xs, const Counts& rows, const Inputs& as, const Inputs& bs) {
    require(rows.size() == xs.size() && as.size() == xs.size() && bs.size() == xs.size(), "expected one per matrix");
    const bool large = is_large(xs);
    int32_t largest = 0;
    for (size_t i = 0; i < xs.size(); ++i) {
        const auto [n, m] = shape_of(xs[i].numel, rows[i]);
        const size_t rank = as[i].numel / n;
        require(rank > 0 && as[i].numel == rank * n && bs[i].numel == rank * m, "factors: expected as many vectors");
        largest = std::max(largest, store_factors(xs[i].data, n, m, as[i].data, bs[i].data, rank, large));
    }
    if (large) finish_streams();
    return largest < kInfinityBits;
}

void low_rank_orthonormal(Input xs, size_t rank, size_t n, Output out) {
    const size_t count = std::min(rank, n);
    require(count > 0 && xs.numel % (rank * n) == 0, "xs: expected whole stacks of vectors");
    require(out.numel == xs.numel / rank * count, "out: expected a vector for each, and at most as many as elements");
    std::vector<double> wide(count * n), factors(count), signs(count), x(n);
    for (size_t at = 0, to = 0; at < xs.numel; at += rank * n, to += count * n) {
        std::copy_n(xs.data + at, count * n, wide.data());
        orthonormalise(wide.data(), count, n, factors.data(), signs.data(), x.data(), out.data + to);
    }
}

}  // namespace thinwire
