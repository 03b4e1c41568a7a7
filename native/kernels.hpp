// The kernels, free of Python. A segment is one tensor; `numel` < 2^31. Byte layouts: docs/wire.md.
// Wrong sizes and corrupt payloads throw std::invalid_argument before memory outside a segment is touched.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

namespace thinwire {

// Memory that the caller owns.
template <typename T>
struct View {
    T* data;
    size_t numel;
};

using Input = View<const float>;
using Output = View<float>;
using Payload = View<const uint8_t>;  // may start at any address
using Bytes = View<uint8_t>;
using Indices = View<const int32_t>;
using IndicesOut = View<int32_t>;

// One entry per segment. Residuals are an empty list or one per segment, which may be the segment itself.
using Inputs = std::vector<Input>;
using Outputs = std::vector<Output>;
using DoublesOut = std::vector<View<double>>;
using Keys = std::vector<uint64_t>;
using Counts = std::vector<int64_t>;

using Payloads = std::vector<Payload>;  // one per worker

// How segments are cut and codes are sent.
struct Buckets {
    int bits;     // 1 to 16
    size_t size;  // at least 1
    bool l2;      // the scale is the bucket's L2 norm, else its largest magnitude
};

// ---- random, permutation ----

void uniform(uint64_t key, Output out);
void random_indices(const Keys& keys, const Counts& counts, const Counts& numels, IndicesOut out);

// ---- quantize: evenly spaced levels ----

struct Quantizer {
    Buckets buckets;
    int num_steps;  // 1 to 2^bits - 1
};

// Segment s has distinct[which[s]], or the first one if `which` is empty. A payload is that of each distinct quantizer, for all
// its segments, in this order.
struct Quantizers {
    std::vector<Quantizer> distinct;
    std::vector<size_t> which;
};

void quantize_encode(const Inputs& xs, Bytes out, const Keys& keys, const Quantizers& quantizers,
                     const Outputs& residuals);
void quantize_decode_add(Payload payload, const Outputs& outs, float weight, const Quantizers& quantizers);
// Writes `weight` times the sum of the payloads, in their order; returns whether all of it is finite.
bool quantize_decode_sum(const Payloads& payloads, const Outputs& outs, float weight, const Quantizers& quantizers);

// ---- levels ----

struct Levels {
    Buckets buckets;            // `bits` has room for the levels
    std::vector<float> values;  // 2 to 256, ascending in [-1, 1]
};

void levels_encode(const Inputs& xs, Bytes out, const Keys& keys, const Levels& levels, const Outputs& residuals);
void levels_decode_add(Payload payload, const Outputs& outs, float weight, const Levels& levels);

// ---- sign, onebit ----

// The scale is the mean magnitude, or `fixed_scale`, if any, where that mean is finite and not zero.
void sign_encode(const Inputs& xs, Bytes out, const Outputs& residuals, std::optional<float> fixed_scale);
void sign_decode_add(Payload payload, const Outputs& outs, float weight);

void onebit_encode(const Inputs& xs, Bytes out, size_t bucket_size, const Outputs& residuals);
void onebit_decode_add(Payload payload, const Outputs& outs, float weight, size_t bucket_size);

// ---- bin_means ----

// The means of 2^bits bins for each bucket of all segments, then the codes.
void bin_means_encode(const Inputs& xs, Bytes out, int bits, size_t bucket_size, const Outputs& residuals);
void bin_means_decode_add(Payload payload, const Outputs& outs, float weight, int bits, size_t bucket_size);

// ---- cast ----

// Values of all segments; for the 8-bit types a float32 scale for each segment before them.
enum class FloatType { kBFloat16, kFloat16, kE4M3, kE5M2 };

void cast_encode(const Inputs& xs, Bytes out, FloatType type, const Outputs& residuals);
void cast_decode_add(Payload payload, const Outputs& outs, float weight, FloatType type);

// ---- ternary ----

struct Ternary {
    int base;  // 3, or 2 W + 1: then up to W payloads may be added as vectors of int32
    size_t bucket_size;
};

// Scales, one per bucket, are given to the coder: from ternary_scales, or agreed upon by all workers.
void ternary_scales(const Inputs& xs, float clip, size_t bucket_size, Output scales);
void ternary_encode(const Inputs& xs, Input scales, Bytes out, const Keys& keys, const Ternary& ternary,
                    const Outputs& residuals);
void ternary_decode_add(Payload payload, Input scales, const Outputs& outs, float weight, const Ternary& ternary);

// ---- entropy ----

// Symbols of 1 to 8 bits, packed as quantized codes are: counts[i] of segment i, byte aligned. The payload's buffer has
// nine bytes more than the symbols; the size that was used is returned.
size_t huffman_encode(Payload packed, const Counts& counts, int bits, Bytes payload);
void huffman_decode(Payload payload, const Counts& counts, int bits, Bytes packed);

// ---- select ----

// Selected elements of all segments, one after the other.
struct Selection {
    Counts counts;
    std::unique_ptr<int32_t[]> indices;
    std::unique_ptr<float[]> values;
    size_t numel;
};

void topk(const Inputs& xs, const Counts& counts, IndicesOut indices, Output values);
Selection above(const Inputs& xs, const std::vector<float>& thresholds);
// Chunks of `chunk` elements keep `count` each; the shorter last one of a segment, if any, its entry of `last_counts`.
void topk_in_chunks(const Inputs& xs, size_t chunk, size_t count, const Counts& last_counts, IndicesOut indices,
                    Output values);
std::vector<float> largest(const Inputs& xs);

// ---- scatter ----

void gather(const Inputs& xs, Indices indices, Output values, const Counts& counts);
// And makes the first value of a segment NaN if the segment holds an infinite or NaN element.
void gather_marked(const Inputs& xs, Indices indices, Output values, const Counts& counts);
void scatter_write(const Outputs& outs, Indices indices, Input values, const Counts& counts);
void scatter_clear(const Outputs& outs, Indices indices, const Counts& counts);
void scatter_add(const Outputs& outs, Indices indices, Input values, const Counts& counts, float weight);
// outs = weight * the sum over payloads, whose indices ascend; returns whether it is finite.
bool scatter_total(const Outputs& outs, const std::vector<Indices>& indices, const Inputs& values,
                   const std::vector<Counts>& counts, float weight);

// ---- indices, smallest, rice, words ----

void indices_encode(Indices indices, const Counts& counts, const Counts& numels, Bytes out);
void indices_decode(Payload payload, const Counts& counts, const Counts& numels, IndicesOut indices);
std::vector<uint8_t> smallest_encode(Indices indices, const Counts& counts, const Counts& numels);
void smallest_decode(Payload payload, const Counts& counts, const Counts& numels, IndicesOut indices);
std::vector<uint8_t> rice_encode(Indices indices, const Counts& counts, const Counts& numels);
void rice_decode(Payload payload, const Counts& counts, const Counts& numels, IndicesOut indices);
void words_encode(Indices words, int bits, Bytes out);
void words_decode(Payload payload, int bits, IndicesOut words);

// ---- momentum ----

// What becomes of gradients g, momenta u and velocities v: momentum of either form, or v + g, which needs no u.
enum class Rule { plain, nesterov, feedback };

// Segments of g, u and v, and where the new u and v are written; none may overlap.
struct MomentumBuffers {
    Inputs gs, us, vs;
    Outputs new_us, new_vs;
};

struct Momentum {
    float momentum;
    float factor;  // of the gradients
    Rule rule;
};

void momentum_correct(const MomentumBuffers& buffers, const Momentum& m);
// And exactly counts[i] largest magnitudes of the new velocity, as `topk` finds them.
void momentum_correct_topk(const MomentumBuffers& buffers, const Momentum& m, const Counts& counts,
                           IndicesOut indices, Output values);
// outs = es + factor * gs, and their top-k.
void add_topk(const Inputs& gs, const Inputs& es, const Outputs& outs, float factor, const Counts& counts,
              IndicesOut indices, Output values);

// ---- low_rank ----

// Matrices of rows[i] rows. `ps` are vectors of the side that they multiply, one after the other, and `outs` of the other.
void low_rank_products(const Inputs& xs, const Counts& rows, const Inputs& ps, bool left, const Outputs& outs);
// x += sum_r a_r b_r', with a_r of the rows' size and b_r of the columns'.
void low_rank_add(const Outputs& xs, const Counts& rows, const Inputs& as, const Inputs& bs);
// xs = es + factor gs, and outs the products of xs with `ps`, vectors of the columns' size.
void low_rank_add_products(const Inputs& gs, const Inputs& es, float factor, const Counts& rows, const Inputs& ps,
                           const Outputs& xs, const Outputs& outs);
// Stacks of `rank` vectors of n numbers, as columns Q R with a diagonal of R that is not negative; `out` is Q, of which each
// stack has min(rank, n) vectors.
void low_rank_orthonormal(Input xs, size_t rank, size_t n, Output out);
// x = sum_r a_r b_r'; returns whether it is finite.
bool low_rank_store(const Outputs& xs, const Counts& rows, const Inputs& as, const Inputs& bs);

// ---- mix ----

// outs += own_weight own + sum_k weights[k] (theirs[k] - own); returns whether what was added is finite. Vectors hold all segments.
bool mix_add(const Outputs& outs, Input own, const Inputs& theirs, const std::vector<float>& weights,
             float own_weight);

// ---- difference ----

// Encodes v = x - y; or, if `sum`, v = x + y, which is also written to y. If `measured`, returns <c, c>, <v, c> and <v, v>
// for the decoding c, up to rounding.
std::vector<double> difference_encode(const Inputs& xs, const Outputs& ys, bool sum, Bytes out, const Keys& keys,
                                      const Quantizer& quantizer, bool measured);
std::vector<double> dense_sums(const Inputs& vs, const Inputs& cs);
// With v_k the payloads times their factors, the own first:
// h += v_0;  gap += (weights[0] - 1) v_0 + sum_{k > 0} weights[k] v_k, in float64;  x += step gap.
void choco_decode_add(const Outputs& xs, const Outputs& hs, const DoublesOut& gaps, const Payloads& payloads,
                      const std::vector<float>& factors, const std::vector<double>& weights, double step,
                      const Quantizer& quantizer);
void choco_dense_add(const Outputs& xs, const Outputs& hs, const DoublesOut& gaps, const Inputs& vectors,
                     const std::vector<double>& weights, double step);
// lost -= v_0, where given;  x += step (sum_{k > 0} weights[k] v_k - weights[0] v_0).
void squeeze_decode_add(const Outputs& xs, const Outputs& losts, const Payloads& payloads,
                        const std::vector<float>& factors, const std::vector<float>& weights, float step,
                        const Quantizer& quantizer);

// ---- modular ----

// Writes the payload of one bucket of all elements, modulo `modulus`, and of half the modulus itself. Returns the check of
// codes and turns, modulo 2^64, and the largest magnitude.
std::tuple<uint64_t, float> modular_encode(const Inputs& xs, Bytes out, uint64_t key, int bits, float modulus);
// Of the crossings between two workers' codes: the check's sum modulo 2^64, the sum of magnitudes, and of squares.
std::vector<int64_t> modular_sums(Payload own, Payload theirs, size_t numel, uint64_t key, int bits);
// outs += sum_k weights[k] crossings(payloads[k + 1], payloads[0]).
void modular_add(const Outputs& outs, const Payloads& payloads, const std::vector<float>& weights, int bits);
// The same with differences modulo `modulus`, of the values `own` that payloads[0] holds; returns whether all are finite.
bool modular_recover_add(const Outputs& outs, Input own, const Payloads& payloads, const std::vector<float>& weights,
                         int bits, float modulus);

// ---- reduce ----

// The L1 norm of each chunk of `chunk` elements; the last one of a segment may be shorter.
void chunk_norms(const Inputs& xs, size_t chunk, Output norms);
bool all_finite(const Inputs& xs);

// ---- threads ----

// How many threads the larger kernels may use, of the whole process; 1 by default. Results do not depend on it.
void set_threads(int n);
int threads();

// Throws std::invalid_argument with `message` unless `ok`.
void require(bool ok, const char* message);
// There are no residuals, or one of each segment's size.
void require_fitting(const Outputs& residuals, const Inputs& xs);

}  // namespace thinwire
