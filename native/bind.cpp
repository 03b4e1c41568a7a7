// The only file that knows Python. Types state what each argument must be; the kernels run without the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "kernels.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

template <typename T>
using Array = nb::ndarray<T, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

using InputList = std::vector<Array<const float>>;
using OutputList = std::vector<Array<float>>;
using Counts = std::vector<int64_t>;

template <typename Segment, typename List>
std::vector<Segment> segments(const List& arrays) {
    std::vector<Segment> out;
    out.reserve(arrays.size());
    for (const auto& array : arrays) out.push_back({array.data(), array.size()});
    return out;
}

std::vector<thinwire::Input> inputs(const InputList& arrays) { return segments<thinwire::Input>(arrays); }

std::vector<thinwire::Output> outputs(const OutputList& arrays) { return segments<thinwire::Output>(arrays); }

// An array that owns what it shows.
template <typename T>
Array<T> owned(std::unique_ptr<T[]> data, size_t numel) {
    T* raw = data.release();
    nb::capsule owner(raw, [](void* p) noexcept { delete[] static_cast<T*>(p); });
    return Array<T>(raw, {numel}, owner);
}

void uniform(uint64_t key, const Array<float>& out) {
    nb::gil_scoped_release release;
    thinwire::uniform(key, out.data(), out.size());
}

void quantize(const InputList& xs, const Array<uint8_t>& out, const std::vector<uint64_t>& keys, int bits,
              int num_steps, size_t bucket_size, bool l2, const OutputList& residuals) {
    const auto from = inputs(xs);
    const auto to = outputs(residuals);
    nb::gil_scoped_release release;
    thinwire::quantize(from, out.data(), out.size(), keys, {{bits, bucket_size, l2}, num_steps}, to);
}

void dequantize_add(const Array<const uint8_t>& payload, const OutputList& outs, double weight, int bits,
                    int num_steps, size_t bucket_size) {
    const auto to = outputs(outs);
    nb::gil_scoped_release release;
    thinwire::dequantize_add(payload.data(), payload.size(), to, static_cast<float>(weight),
                             {{bits, bucket_size, false}, num_steps});
}

bool dequantize_sum(const std::vector<Array<const uint8_t>>& payloads, const OutputList& outs, double weight, int bits,
                    int num_steps, size_t bucket_size) {
    const auto from = segments<thinwire::Payload>(payloads);
    const auto to = outputs(outs);
    nb::gil_scoped_release release;
    return thinwire::dequantize_sum(from, to, static_cast<float>(weight), {{bits, bucket_size, false}, num_steps});
}

void quantize_levels(const InputList& xs, const Array<uint8_t>& out, const std::vector<uint64_t>& keys,
                     const std::vector<float>& levels, int bits, size_t bucket_size, bool l2,
                     const OutputList& residuals) {
    const auto from = inputs(xs);
    const auto to = outputs(residuals);
    nb::gil_scoped_release release;
    thinwire::quantize_levels(from, out.data(), out.size(), keys, levels, {bits, bucket_size, l2}, to);
}

void dequantize_levels_add(const Array<const uint8_t>& payload, const OutputList& outs, double weight,
                           const std::vector<float>& levels, int bits, size_t bucket_size) {
    const auto to = outputs(outs);
    nb::gil_scoped_release release;
    thinwire::dequantize_levels_add(payload.data(), payload.size(), to, static_cast<float>(weight), levels,
                                    {bits, bucket_size, false});
}

void sign_pack(const InputList& xs, const Array<uint8_t>& out, const OutputList& residuals,
               std::optional<float> fixed_scale) {
    const auto from = inputs(xs);
    const auto to = outputs(residuals);
    nb::gil_scoped_release release;
    thinwire::sign_pack(from, out.data(), out.size(), to, fixed_scale ? &*fixed_scale : nullptr);
}

thinwire::FloatType float_type(int type) {
    thinwire::require(type >= 0 && type <= static_cast<int>(thinwire::FloatType::kE5M2), "type: expected 0 to 3");
    return static_cast<thinwire::FloatType>(type);
}

void cast_pack(const InputList& xs, const Array<uint8_t>& out, int type, const OutputList& residuals) {
    const auto from = inputs(xs);
    const auto to = outputs(residuals);
    nb::gil_scoped_release release;
    thinwire::cast_pack(from, out.data(), out.size(), float_type(type), to);
}

void cast_decode_add(const Array<const uint8_t>& payload, const OutputList& outs, double weight, int type) {
    const auto to = outputs(outs);
    nb::gil_scoped_release release;
    thinwire::cast_decode_add(payload.data(), payload.size(), to, static_cast<float>(weight), float_type(type));
}

void onebit_pack(const InputList& xs, const Array<uint8_t>& out, size_t bucket_size, const OutputList& residuals) {
    const auto from = inputs(xs);
    const auto to = outputs(residuals);
    nb::gil_scoped_release release;
    thinwire::onebit_pack(from, out.data(), out.size(), bucket_size, to);
}

void onebit_decode_add(const Array<const uint8_t>& payload, const OutputList& outs, double weight,
                       size_t bucket_size) {
    const auto to = outputs(outs);
    nb::gil_scoped_release release;
    thinwire::onebit_decode_add(payload.data(), payload.size(), to, static_cast<float>(weight), bucket_size);
}

size_t huffman_encode(const Array<const uint8_t>& packed, const Counts& counts, int bits, const Array<uint8_t>& out) {
    nb::gil_scoped_release release;
    return thinwire::huffman_encode(packed.data(), packed.size(), counts, bits, out.data(), out.size());
}

void huffman_decode(const Array<const uint8_t>& payload, const Counts& counts, int bits, const Array<uint8_t>& out) {
    nb::gil_scoped_release release;
    thinwire::huffman_decode(payload.data(), payload.size(), counts, bits, out.data(), out.size());
}

void ternary_scales(const InputList& xs, double clip, size_t bucket_size, const Array<float>& scales) {
    const auto from = inputs(xs);
    nb::gil_scoped_release release;
    thinwire::ternary_scales(from, static_cast<float>(clip), bucket_size, scales.data(), scales.size());
}

void ternary_pack(const InputList& xs, const Array<const float>& scales, const Array<uint8_t>& out,
                  const std::vector<uint64_t>& keys, int base, size_t bucket_size, const OutputList& residuals) {
    const auto from = inputs(xs);
    const auto to = outputs(residuals);
    nb::gil_scoped_release release;
    thinwire::ternary_pack(from, scales.data(), scales.size(), out.data(), out.size(), keys, base, bucket_size, to);
}

void ternary_decode_add(const Array<const uint8_t>& payload, const Array<const float>& scales, const OutputList& outs,
                        double weight, int base, size_t bucket_size) {
    const auto to = outputs(outs);
    nb::gil_scoped_release release;
    thinwire::ternary_decode_add(payload.data(), payload.size(), scales.data(), scales.size(), to,
                                 static_cast<float>(weight), base, bucket_size);
}

void sign_decode_add(const Array<const uint8_t>& payload, const OutputList& outs, double weight) {
    const auto to = outputs(outs);
    nb::gil_scoped_release release;
    thinwire::sign_decode_add(payload.data(), payload.size(), to, static_cast<float>(weight));
}

void require_pairs(size_t indices, size_t values) {
    thinwire::require(indices == values, "indices and values: expected the same number of elements");
}

void topk(const InputList& xs, const Counts& counts, const Array<int32_t>& indices, const Array<float>& values) {
    require_pairs(indices.size(), values.size());
    const auto from = inputs(xs);
    nb::gil_scoped_release release;
    thinwire::topk(from, counts, indices.data(), values.data(), indices.size());
}

std::tuple<Array<int32_t>, Array<float>, Counts> select_above(const InputList& xs,
                                                              const std::vector<double>& thresholds) {
    const auto from = inputs(xs);
    const std::vector<float> rounded(thresholds.begin(), thresholds.end());
    thinwire::Selection kept;
    {
        nb::gil_scoped_release release;
        kept = thinwire::select(from, rounded);
    }
    return {owned(std::move(kept.indices), kept.numel), owned(std::move(kept.values), kept.numel),
            std::move(kept.counts)};
}

void topk_in_chunks(const InputList& xs, size_t chunk, size_t count, const Counts& last_counts,
                    const Array<int32_t>& indices, const Array<float>& values) {
    require_pairs(indices.size(), values.size());
    const auto from = inputs(xs);
    nb::gil_scoped_release release;
    thinwire::topk_in_chunks(from, chunk, count, last_counts, indices.data(), values.data(), indices.size());
}

std::vector<float> largest(const InputList& xs) {
    const auto from = inputs(xs);
    nb::gil_scoped_release release;
    return thinwire::largest(from);
}

void random_indices(const std::vector<uint64_t>& keys, const Counts& counts, const Counts& numels,
                    const Array<int32_t>& indices) {
    nb::gil_scoped_release release;
    thinwire::random_indices(keys, counts, numels, indices.data(), indices.size());
}

void gather(const InputList& xs, const Array<const int32_t>& indices, const Array<float>& values,
            const Counts& counts) {
    require_pairs(indices.size(), values.size());
    const auto from = inputs(xs);
    nb::gil_scoped_release release;
    thinwire::gather(from, indices.data(), values.data(), indices.size(), counts);
}

void scatter(const OutputList& outs, const Array<const int32_t>& indices, const Array<const float>& values,
             const Counts& counts) {
    require_pairs(indices.size(), values.size());
    const auto to = outputs(outs);
    nb::gil_scoped_release release;
    thinwire::scatter(to, indices.data(), values.data(), indices.size(), counts);
}

void clear(const OutputList& outs, const Array<const int32_t>& indices, const Counts& counts) {
    const auto to = outputs(outs);
    nb::gil_scoped_release release;
    thinwire::clear(to, indices.data(), indices.size(), counts);
}

void scatter_add(const OutputList& outs, const Array<const int32_t>& indices, const Array<const float>& values,
                 const Counts& counts, double weight) {
    require_pairs(indices.size(), values.size());
    const auto to = outputs(outs);
    nb::gil_scoped_release release;
    thinwire::scatter_add(to, indices.data(), values.data(), indices.size(), counts, static_cast<float>(weight));
}

void pack_indices(const Array<const int32_t>& indices, const Counts& counts, const Counts& numels,
                  const Array<uint8_t>& out) {
    nb::gil_scoped_release release;
    thinwire::pack_indices(indices.data(), indices.size(), counts, numels, out.data(), out.size());
}

void unpack_indices(const Array<const uint8_t>& payload, const Counts& counts, const Counts& numels,
                    const Array<int32_t>& indices) {
    nb::gil_scoped_release release;
    thinwire::unpack_indices(payload.data(), payload.size(), counts, numels, indices.data(), indices.size());
}

using PackIndices = decltype(&thinwire::pack_smallest);

Array<uint8_t> packed_by(PackIndices pack, const Array<const int32_t>& indices, const Counts& counts,
                         const Counts& numels) {
    std::vector<uint8_t> packed;
    {
        nb::gil_scoped_release release;
        packed = pack(indices.data(), indices.size(), counts, numels);
    }
    std::unique_ptr<uint8_t[]> data(new uint8_t[packed.size()]);
    std::copy(packed.begin(), packed.end(), data.get());
    return owned(std::move(data), packed.size());
}

Array<uint8_t> pack_smallest(const Array<const int32_t>& indices, const Counts& counts, const Counts& numels) {
    return packed_by(&thinwire::pack_smallest, indices, counts, numels);
}

Array<uint8_t> pack_rice(const Array<const int32_t>& indices, const Counts& counts, const Counts& numels) {
    return packed_by(&thinwire::pack_rice, indices, counts, numels);
}

void unpack_rice(const Array<const uint8_t>& payload, const Counts& counts, const Counts& numels,
                 const Array<int32_t>& indices) {
    nb::gil_scoped_release release;
    thinwire::unpack_rice(payload.data(), payload.size(), counts, numels, indices.data(), indices.size());
}

void unpack_smallest(const Array<const uint8_t>& payload, const Counts& counts, const Counts& numels,
                     const Array<int32_t>& indices) {
    nb::gil_scoped_release release;
    thinwire::unpack_smallest(payload.data(), payload.size(), counts, numels, indices.data(), indices.size());
}

void pack_words(const Array<const int32_t>& words, int bits, const Array<uint8_t>& out) {
    nb::gil_scoped_release release;
    thinwire::pack_words(words.data(), words.size(), bits, out.data(), out.size());
}

void unpack_words(const Array<const uint8_t>& payload, int bits, const Array<int32_t>& words) {
    nb::gil_scoped_release release;
    thinwire::unpack_words(payload.data(), payload.size(), bits, words.data(), words.size());
}

thinwire::MomentumBuffers momentum_buffers(const InputList& gs, const InputList& us, const InputList& vs,
                                           const OutputList& new_us, const OutputList& new_vs) {
    return {inputs(gs), inputs(us), inputs(vs), outputs(new_us), outputs(new_vs)};
}

thinwire::Momentum momentum_rule(double momentum, double factor, bool nesterov) {
    return {static_cast<float>(momentum), static_cast<float>(factor),
            nesterov ? thinwire::Rule::nesterov : thinwire::Rule::plain};
}

void momentum(const InputList& gs, const InputList& us, const InputList& vs, const OutputList& new_us,
              const OutputList& new_vs, double momentum, double factor, bool nesterov) {
    const auto buffers = momentum_buffers(gs, us, vs, new_us, new_vs);
    nb::gil_scoped_release release;
    thinwire::momentum(buffers, momentum_rule(momentum, factor, nesterov));
}

void momentum_topk(const InputList& gs, const InputList& us, const InputList& vs, const OutputList& new_us,
                   const OutputList& new_vs, double momentum, double factor, bool nesterov, const Counts& counts,
                   const Array<int32_t>& indices, const Array<float>& values) {
    require_pairs(indices.size(), values.size());
    const auto buffers = momentum_buffers(gs, us, vs, new_us, new_vs);
    nb::gil_scoped_release release;
    thinwire::momentum_topk(buffers, momentum_rule(momentum, factor, nesterov), counts, indices.data(), values.data(),
                            indices.size());
}

void add_topk(const InputList& gs, const InputList& es, const OutputList& outs, double factor, const Counts& counts,
              const Array<int32_t>& indices, const Array<float>& values) {
    require_pairs(indices.size(), values.size());
    const auto buffers = momentum_buffers(gs, {}, es, {}, outs);
    nb::gil_scoped_release release;
    thinwire::momentum_topk(buffers, {0, static_cast<float>(factor), thinwire::Rule::feedback}, counts, indices.data(),
                            values.data(), indices.size());
}

void chunk_norms(const InputList& xs, size_t chunk, const Array<float>& out) {
    const auto from = inputs(xs);
    nb::gil_scoped_release release;
    thinwire::chunk_norms(from, chunk, out.data(), out.size());
}

bool all_finite(const InputList& xs) {
    const auto from = inputs(xs);
    nb::gil_scoped_release release;
    return thinwire::all_finite(from);
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "Kernels for tensors in main memory; `thinwire.kernels` documents them.";
    m.def("uniform", &uniform, "key"_a, "out"_a.noconvert());
    m.def("quantize", &quantize, "xs"_a.noconvert(), "out"_a.noconvert(), "keys"_a, "bits"_a, "num_steps"_a,
          "bucket_size"_a, "l2"_a, "residuals"_a.noconvert());
    m.def("dequantize_add", &dequantize_add, "payload"_a.noconvert(), "outs"_a.noconvert(), "weight"_a, "bits"_a,
          "num_steps"_a, "bucket_size"_a);
    m.def("dequantize_sum", &dequantize_sum, "payloads"_a.noconvert(), "outs"_a.noconvert(), "weight"_a, "bits"_a,
          "num_steps"_a, "bucket_size"_a);
    m.def("quantize_levels", &quantize_levels, "xs"_a.noconvert(), "out"_a.noconvert(), "keys"_a, "levels"_a, "bits"_a,
          "bucket_size"_a, "l2"_a, "residuals"_a.noconvert());
    m.def("dequantize_levels_add", &dequantize_levels_add, "payload"_a.noconvert(), "outs"_a.noconvert(), "weight"_a,
          "levels"_a, "bits"_a, "bucket_size"_a);
    m.def("sign_pack", &sign_pack, "xs"_a.noconvert(), "out"_a.noconvert(), "residuals"_a.noconvert(),
          "fixed_scale"_a.none());
    m.def("sign_decode_add", &sign_decode_add, "payload"_a.noconvert(), "outs"_a.noconvert(), "weight"_a);
    m.def("cast_pack", &cast_pack, "xs"_a.noconvert(), "out"_a.noconvert(), "type"_a, "residuals"_a.noconvert());
    m.def("cast_decode_add", &cast_decode_add, "payload"_a.noconvert(), "outs"_a.noconvert(), "weight"_a, "type"_a);
    m.def("onebit_pack", &onebit_pack, "xs"_a.noconvert(), "out"_a.noconvert(), "bucket_size"_a,
          "residuals"_a.noconvert());
    m.def("onebit_decode_add", &onebit_decode_add, "payload"_a.noconvert(), "outs"_a.noconvert(), "weight"_a,
          "bucket_size"_a);
    m.def("huffman_encode", &huffman_encode, "packed"_a.noconvert(), "counts"_a, "bits"_a, "out"_a.noconvert());
    m.def("huffman_decode", &huffman_decode, "payload"_a.noconvert(), "counts"_a, "bits"_a, "out"_a.noconvert());
    m.def("ternary_scales", &ternary_scales, "xs"_a.noconvert(), "clip"_a, "bucket_size"_a, "scales"_a.noconvert());
    m.def("ternary_pack", &ternary_pack, "xs"_a.noconvert(), "scales"_a.noconvert(), "out"_a.noconvert(), "keys"_a,
          "base"_a, "bucket_size"_a, "residuals"_a.noconvert());
    m.def("ternary_decode_add", &ternary_decode_add, "payload"_a.noconvert(), "scales"_a.noconvert(),
          "outs"_a.noconvert(), "weight"_a, "base"_a, "bucket_size"_a);
    m.def("topk", &topk, "xs"_a.noconvert(), "counts"_a, "indices"_a.noconvert(), "values"_a.noconvert());
    m.def("select", &select_above, "xs"_a.noconvert(), "thresholds"_a);
    m.def("topk_in_chunks", &topk_in_chunks, "xs"_a.noconvert(), "chunk"_a, "count"_a, "last_counts"_a,
          "indices"_a.noconvert(), "values"_a.noconvert());
    m.def("largest", &largest, "xs"_a.noconvert());
    m.def("random_indices", &random_indices, "keys"_a, "counts"_a, "numels"_a, "indices"_a.noconvert());
    m.def("gather", &gather, "xs"_a.noconvert(), "indices"_a.noconvert(), "values"_a.noconvert(), "counts"_a);
    m.def("scatter", &scatter, "outs"_a.noconvert(), "indices"_a.noconvert(), "values"_a.noconvert(), "counts"_a);
    m.def("clear", &clear, "outs"_a.noconvert(), "indices"_a.noconvert(), "counts"_a);
    m.def("scatter_add", &scatter_add, "outs"_a.noconvert(), "indices"_a.noconvert(), "values"_a.noconvert(),
          "counts"_a, "weight"_a);
    m.def("pack_indices", &pack_indices, "indices"_a.noconvert(), "counts"_a, "numels"_a, "out"_a.noconvert());
    m.def("unpack_indices", &unpack_indices, "payload"_a.noconvert(), "counts"_a, "numels"_a,
          "indices"_a.noconvert());
    m.def("pack_smallest", &pack_smallest, "indices"_a.noconvert(), "counts"_a, "numels"_a);
    m.def("unpack_smallest", &unpack_smallest, "payload"_a.noconvert(), "counts"_a, "numels"_a,
          "indices"_a.noconvert());
    m.def("pack_rice", &pack_rice, "indices"_a.noconvert(), "counts"_a, "numels"_a);
    m.def("unpack_rice", &unpack_rice, "payload"_a.noconvert(), "counts"_a, "numels"_a,
          "indices"_a.noconvert());
    m.def("pack_words", &pack_words, "words"_a.noconvert(), "bits"_a, "out"_a.noconvert());
    m.def("unpack_words", &unpack_words, "payload"_a.noconvert(), "bits"_a, "words"_a.noconvert());
    m.def("momentum", &momentum, "gs"_a.noconvert(), "us"_a.noconvert(), "vs"_a.noconvert(), "new_us"_a.noconvert(),
          "new_vs"_a.noconvert(), "momentum"_a, "factor"_a, "nesterov"_a);
    m.def("momentum_topk", &momentum_topk, "gs"_a.noconvert(), "us"_a.noconvert(), "vs"_a.noconvert(),
          "new_us"_a.noconvert(), "new_vs"_a.noconvert(), "momentum"_a, "factor"_a, "nesterov"_a, "counts"_a,
          "indices"_a.noconvert(), "values"_a.noconvert());
    m.def("add_topk", &add_topk, "gs"_a.noconvert(), "es"_a.noconvert(), "outs"_a.noconvert(), "factor"_a, "counts"_a,
          "indices"_a.noconvert(), "values"_a.noconvert());
    m.def("chunk_norms", &chunk_norms, "xs"_a.noconvert(), "chunk"_a, "out"_a.noconvert());
    m.def("all_finite", &all_finite, "xs"_a.noconvert());
}
