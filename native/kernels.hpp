// The kernels, free of Python. A segment is one tensor; `numel` < 2^31. Byte layouts: docs/wire.md.
// Wrong sizes and corrupt payloads throw std::invalid_argument before memory outside a segment is touched.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace thinwire {

struct Input {
    const float* data;
    size_t numel;
};

struct Output {
    float* data;
    size_t numel;
};

struct Payload {
    const uint8_t* data;
    size_t nbytes;
};

// How segments are cut and codes are sent.
struct Buckets {
    int bits;     // 1 to 16
    size_t size;  // at least 1
    bool l2;      // the scale is the bucket's L2 norm, else its largest magnitude
};

struct Quantizer {
    Buckets buckets;
    int num_steps;  // 1 to 2^bits - 1
};

void uniform(uint64_t key, float* out, size_t numel);

// `residuals` is empty, or holds one per segment, which may be the segment itself.
void quantize(const std::vector<Input>& xs, uint8_t* out, size_t out_nbytes, const std::vector<uint64_t>& keys,
              const Quantizer& quantizer, const std::vector<Output>& residuals);
void dequantize_add(const uint8_t* payload, size_t nbytes, const std::vector<Output>& outs, float weight,
                    const Quantizer& quantizer);
// Writes `weight` times the sum of the payloads, in their order; returns whether all of it is finite.
bool dequantize_sum(const std::vector<Payload>& payloads, const std::vector<Output>& outs, float weight,
                    const Quantizer& quantizer);

// Levels ascend in [-1, 1]; there are 2 to 256 of them, and `bits` has room for them.
void quantize_levels(const std::vector<Input>& xs, uint8_t* out, size_t out_nbytes, const std::vector<uint64_t>& keys,
                     const std::vector<float>& levels, const Buckets& buckets, const std::vector<Output>& residuals);
void dequantize_levels_add(const uint8_t* payload, size_t nbytes, const std::vector<Output>& outs, float weight,
                           const std::vector<float>& levels, const Buckets& buckets);

// The scale is the mean magnitude, or `fixed_scale` (null for none) where that mean is finite.
void sign_pack(const std::vector<Input>& xs, uint8_t* out, size_t out_nbytes, const std::vector<Output>& residuals,
               const float* fixed_scale);
void sign_decode_add(const uint8_t* payload, size_t nbytes, const std::vector<Output>& outs, float weight);

// Values of all segments; for the 8-bit types a scale for each segment, float32, before them.
enum class FloatType { kBFloat16, kFloat16, kE4M3, kE5M2 };
void cast_pack(const std::vector<Input>& xs, uint8_t* out, size_t out_nbytes, FloatType type,
               const std::vector<Output>& residuals);
void cast_decode_add(const uint8_t* payload, size_t nbytes, const std::vector<Output>& outs, float weight,
                     FloatType type);

void onebit_pack(const std::vector<Input>& xs, uint8_t* out, size_t out_nbytes, size_t bucket_size,
                 const std::vector<Output>& residuals);
void onebit_decode_add(const uint8_t* payload, size_t nbytes, const std::vector<Output>& outs, float weight,
                       size_t bucket_size);

// Scales are given, one per bucket: from ternary_scales, or agreed upon. `base` is 3, or 2 W + 1 for payloads of which up
// to W may be added as vectors of int32.
void ternary_scales(const std::vector<Input>& xs, float clip, size_t bucket_size, float* scales, size_t num_scales);
void ternary_pack(const std::vector<Input>& xs, const float* scales, size_t num_scales, uint8_t* out,
                  size_t out_nbytes, const std::vector<uint64_t>& keys, int base, size_t bucket_size,
                  const std::vector<Output>& residuals);
void ternary_decode_add(const uint8_t* payload, size_t nbytes, const float* scales, size_t num_scales,
                        const std::vector<Output>& outs, float weight, int base, size_t bucket_size);

// Symbols of 1 to 8 bits, packed as quantized codes are: counts[i] of segment i, byte aligned. `out` of the encoder has
// nine bytes more than the symbols; the size is returned.
size_t huffman_encode(const uint8_t* packed, size_t nbytes, const std::vector<int64_t>& counts, int bits,
                      uint8_t* out, size_t out_nbytes);
void huffman_decode(const uint8_t* payload, size_t nbytes, const std::vector<int64_t>& counts, int bits, uint8_t* out,
                    size_t out_nbytes);

// Selected elements of all segments, one after the other.
struct Selection {
    std::vector<int64_t> counts;
    std::unique_ptr<int32_t[]> indices;
    std::unique_ptr<float[]> values;
    size_t numel;
};

void topk(const std::vector<Input>& xs, const std::vector<int64_t>& counts, int32_t* indices, float* values,
          size_t numel);
Selection select(const std::vector<Input>& xs, const std::vector<float>& thresholds);
// Chunks of `chunk` elements keep `count` each; the shorter last one of a segment, if any, its entry of `last_counts`.
void topk_in_chunks(const std::vector<Input>& xs, size_t chunk, size_t count, const std::vector<int64_t>& last_counts,
                    int32_t* indices, float* values, size_t numel);
std::vector<float> largest(const std::vector<Input>& xs);
void random_indices(const std::vector<uint64_t>& keys, const std::vector<int64_t>& counts,
                    const std::vector<int64_t>& numels, int32_t* indices, size_t total);

void gather(const std::vector<Input>& xs, const int32_t* indices, float* values, size_t numel,
            const std::vector<int64_t>& counts);
void scatter(const std::vector<Output>& outs, const int32_t* indices, const float* values, size_t numel,
             const std::vector<int64_t>& counts);
void clear(const std::vector<Output>& outs, const int32_t* indices, size_t numel, const std::vector<int64_t>& counts);
void scatter_add(const std::vector<Output>& outs, const int32_t* indices, const float* values, size_t numel,
                 const std::vector<int64_t>& counts, float weight);

void pack_indices(const int32_t* indices, size_t numel, const std::vector<int64_t>& counts,
                  const std::vector<int64_t>& numels, uint8_t* out, size_t out_nbytes);
void unpack_indices(const uint8_t* payload, size_t nbytes, const std::vector<int64_t>& counts,
                    const std::vector<int64_t>& numels, int32_t* indices, size_t numel);
std::vector<uint8_t> pack_smallest(const int32_t* indices, size_t numel, const std::vector<int64_t>& counts,
                                   const std::vector<int64_t>& numels);
void unpack_smallest(const uint8_t* payload, size_t nbytes, const std::vector<int64_t>& counts,
                     const std::vector<int64_t>& numels, int32_t* indices, size_t numel);
// Gaps between indices, less one, in the Rice code whose parameter follows from counts and numels.
std::vector<uint8_t> pack_rice(const int32_t* indices, size_t numel, const std::vector<int64_t>& counts,
                               const std::vector<int64_t>& numels);
void unpack_rice(const uint8_t* payload, size_t nbytes, const std::vector<int64_t>& counts,
                 const std::vector<int64_t>& numels, int32_t* indices, size_t numel);
void pack_words(const int32_t* words, size_t count, int bits, uint8_t* out, size_t out_nbytes);
void unpack_words(const uint8_t* payload, size_t nbytes, int bits, int32_t* words, size_t count);

// What memory makes of gradients g, momenta u and velocities v: momentum of either form, or v + g, which needs no u.
enum class Rule { plain, nesterov, feedback };

// Segments of g, u and v, and where the new u and v are written; none may overlap.
struct MomentumBuffers {
    std::vector<Input> gs, us, vs;
    std::vector<Output> new_us, new_vs;
};

struct Momentum {
    float momentum;
    float factor;  // of the gradients
    Rule rule;
};

void momentum(const MomentumBuffers& buffers, const Momentum& m);
// And exactly counts[i] largest magnitudes of the new velocity, as `topk` finds them.
void momentum_topk(const MomentumBuffers& buffers, const Momentum& m, const std::vector<int64_t>& counts,
                   int32_t* indices, float* values, size_t numel);

// The L1 norm of each chunk of `chunk` elements; the last one of a segment may be shorter.
void chunk_norms(const std::vector<Input>& xs, size_t chunk, float* out, size_t out_numel);

bool all_finite(const std::vector<Input>& xs);

// Throws std::invalid_argument with `message` unless `ok`.
void require(bool ok, const char* message);

}  // namespace thinwire
