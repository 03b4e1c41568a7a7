// The only file that knows Python. An argument of the wrong type or layout is a TypeError that states what is expected;
// arrays are never converted or copied. The kernels run without the GIL: views point into arrays that the caller holds.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "kernels.hpp"

namespace nb = nanobind;
using namespace nb::literals;

template <typename T>
using Array = nb::ndarray<T, nb::numpy, nb::c_contig, nb::device::cpu>;

// A flat view of a contiguous NumPy array. The caller's argument keeps the array alive during the call.
namespace nanobind::detail {

template <typename T>
struct type_caster<thinwire::View<T>> {
    NB_TYPE_CASTER(thinwire::View<T>, make_caster<Array<T>>::Name)

    bool from_python(handle src, uint8_t flags, cleanup_list* cleanup) noexcept {
        make_caster<Array<T>> array;
        if (!array.from_python(src, flags & ~static_cast<uint8_t>(cast_flags::convert), cleanup)) return false;
        value = {array.value.data(), array.value.size()};
        return true;
    }
};

}  // namespace nanobind::detail

namespace {

using namespace thinwire;

using Unlocked = nb::call_guard<nb::gil_scoped_release>;

// An array that owns its memory.
template <typename T>
Array<T> owned(std::unique_ptr<T[]> data, size_t numel) {
    T* raw = data.release();
    nb::capsule owner(raw, [](void* p) noexcept { delete[] static_cast<T*>(p); });
    return Array<T>(raw, {numel}, owner);
}

std::tuple<Array<int32_t>, Array<float>, Counts> above_owned(const Inputs& xs, const std::vector<float>& thresholds) {
    Selection kept;
    {
        nb::gil_scoped_release release;
        kept = above(xs, thresholds);
    }
    return {owned(std::move(kept.indices), kept.numel), owned(std::move(kept.values), kept.numel),
            std::move(kept.counts)};
}

template <auto encode>
Array<uint8_t> encode_owned(Indices indices, const Counts& counts, const Counts& numels) {
    std::vector<uint8_t> code;
    {
        nb::gil_scoped_release release;
        code = encode(indices, counts, numels);
    }
    std::unique_ptr<uint8_t[]> data(new uint8_t[code.size()]);
    std::copy(code.begin(), code.end(), data.get());
    return owned(std::move(data), code.size());
}

FloatType float_type(int type) {
    require(type >= 0 && type <= static_cast<int>(FloatType::kE5M2), "type: expected 0 to 3");
    return static_cast<FloatType>(type);
}

void cast_encode_as(const Inputs& xs, Bytes out, int type, const Outputs& residuals) {
    cast_encode(xs, out, float_type(type), residuals);
}

void cast_decode_add_as(Payload payload, const Outputs& outs, float weight, int type) {
    cast_decode_add(payload, outs, weight, float_type(type));
}

void correct(const Inputs& gs, const Inputs& us, const Inputs& vs, const Outputs& new_us, const Outputs& new_vs,
             const Momentum& rule) {
    momentum_correct({gs, us, vs, new_us, new_vs}, rule);
}

void correct_topk(const Inputs& gs, const Inputs& us, const Inputs& vs, const Outputs& new_us, const Outputs& new_vs,
                  const Momentum& rule, const Counts& counts, IndicesOut indices, Output values) {
    momentum_correct_topk({gs, us, vs, new_us, new_vs}, rule, counts, indices, values);
}

// A record that Python makes and kernels read: its constructor takes the fields in their order.
template <typename Record, typename... Fields>
void def_record(nb::module_& m, const char* name) {
    nb::class_<Record>(m, name).def("__init__",
                                    [](Record* self, Fields... fields) { new (self) Record{std::move(fields)...}; });
}

void def_records(nb::module_& m) {
    def_record<Buckets, int, size_t, bool>(m, "Buckets");
    def_record<Quantizer, Buckets, int>(m, "Quantizer");
    def_record<Quantizers, std::vector<Quantizer>, std::vector<size_t>>(m, "Quantizers");
    def_record<Levels, Buckets, std::vector<float>>(m, "Levels");
    def_record<Ternary, int, size_t>(m, "Ternary");
    nb::class_<Momentum>(m, "Momentum").def("__init__", [](Momentum* self, float momentum, float factor, bool nesterov) {
        new (self) Momentum{momentum, factor, nesterov ? Rule::nesterov : Rule::plain};
    });
}

void def_quantizers(nb::module_& m) {
    m.def("quantize_encode", &quantize_encode, "xs"_a, "out"_a, "keys"_a, "quantizers"_a, "residuals"_a, Unlocked());
    m.def("quantize_decode_add", &quantize_decode_add, "payload"_a, "outs"_a, "weight"_a, "quantizers"_a, Unlocked());
    m.def("quantize_decode_sum", &quantize_decode_sum, "payloads"_a, "outs"_a, "weight"_a, "quantizers"_a, Unlocked());
    m.def("levels_encode", &levels_encode, "xs"_a, "out"_a, "keys"_a, "levels"_a, "residuals"_a, Unlocked());
    m.def("levels_decode_add", &levels_decode_add, "payload"_a, "outs"_a, "weight"_a, "levels"_a, Unlocked());
    m.def("sign_encode", &sign_encode, "xs"_a, "out"_a, "residuals"_a, "fixed_scale"_a.none(), Unlocked());
    m.def("sign_decode_add", &sign_decode_add, "payload"_a, "outs"_a, "weight"_a, Unlocked());
    m.def("onebit_encode", &onebit_encode, "xs"_a, "out"_a, "bucket_size"_a, "residuals"_a, Unlocked());
    m.def("onebit_decode_add", &onebit_decode_add, "payload"_a, "outs"_a, "weight"_a, "bucket_size"_a, Unlocked());
    m.def("bin_means_encode", &bin_means_encode, "xs"_a, "out"_a, "bits"_a, "bucket_size"_a, "residuals"_a, Unlocked());
    m.def("bin_means_decode_add", &bin_means_decode_add, "payload"_a, "outs"_a, "weight"_a, "bits"_a, "bucket_size"_a,
          Unlocked());
    m.def("cast_encode", &cast_encode_as, "xs"_a, "out"_a, "type"_a, "residuals"_a, Unlocked());
    m.def("cast_decode_add", &cast_decode_add_as, "payload"_a, "outs"_a, "weight"_a, "type"_a, Unlocked());
    m.def("ternary_scales", &ternary_scales, "xs"_a, "clip"_a, "bucket_size"_a, "scales"_a, Unlocked());
    m.def("ternary_encode", &ternary_encode, "xs"_a, "scales"_a, "out"_a, "keys"_a, "ternary"_a, "residuals"_a,
          Unlocked());
    m.def("ternary_decode_add", &ternary_decode_add, "payload"_a, "scales"_a, "outs"_a, "weight"_a, "ternary"_a,
          Unlocked());
    m.def("huffman_encode", &huffman_encode, "packed"_a, "counts"_a, "bits"_a, "payload"_a, Unlocked());
    m.def("huffman_decode", &huffman_decode, "payload"_a, "counts"_a, "bits"_a, "packed"_a, Unlocked());
}

void def_selection(nb::module_& m) {
    m.def("topk", &topk, "xs"_a, "counts"_a, "indices"_a, "values"_a, Unlocked());
    m.def("above", &above_owned, "xs"_a, "thresholds"_a);
    m.def("topk_in_chunks", &topk_in_chunks, "xs"_a, "chunk"_a, "count"_a, "last_counts"_a, "indices"_a, "values"_a,
          Unlocked());
    m.def("largest", &largest, "xs"_a, Unlocked());
    m.def("gather", &gather, "xs"_a, "indices"_a, "values"_a, "counts"_a, Unlocked());
    m.def("gather_marked", &gather_marked, "xs"_a, "indices"_a, "values"_a, "counts"_a, Unlocked());
    m.def("scatter_write", &scatter_write, "outs"_a, "indices"_a, "values"_a, "counts"_a, Unlocked());
    m.def("scatter_clear", &scatter_clear, "outs"_a, "indices"_a, "counts"_a, Unlocked());
    m.def("scatter_total", &scatter_total, "outs"_a, "indices"_a, "values"_a, "counts"_a, "weight"_a, Unlocked());
    m.def("scatter_add", &scatter_add, "outs"_a, "indices"_a, "values"_a, "counts"_a, "weight"_a, Unlocked());
    m.def("momentum_correct", &correct, "gs"_a, "us"_a, "vs"_a, "new_us"_a, "new_vs"_a, "rule"_a, Unlocked());
    m.def("momentum_correct_topk", &correct_topk, "gs"_a, "us"_a, "vs"_a, "new_us"_a, "new_vs"_a, "rule"_a, "counts"_a,
          "indices"_a, "values"_a, Unlocked());
    m.def("add_topk", &add_topk, "gs"_a, "es"_a, "outs"_a, "factor"_a, "counts"_a, "indices"_a, "values"_a,
          Unlocked());
}

void def_indices(nb::module_& m) {
    m.def("random_indices", &random_indices, "keys"_a, "counts"_a, "numels"_a, "indices"_a, Unlocked());
    m.def("indices_encode", &indices_encode, "indices"_a, "counts"_a, "numels"_a, "out"_a, Unlocked());
    m.def("indices_decode", &indices_decode, "payload"_a, "counts"_a, "numels"_a, "indices"_a, Unlocked());
    m.def("smallest_encode", &encode_owned<&smallest_encode>, "indices"_a, "counts"_a, "numels"_a);
    m.def("smallest_decode", &smallest_decode, "payload"_a, "counts"_a, "numels"_a, "indices"_a, Unlocked());
    m.def("rice_encode", &encode_owned<&rice_encode>, "indices"_a, "counts"_a, "numels"_a);
    m.def("rice_decode", &rice_decode, "payload"_a, "counts"_a, "numels"_a, "indices"_a, Unlocked());
    m.def("words_encode", &words_encode, "words"_a, "bits"_a, "out"_a, Unlocked());
    m.def("words_decode", &words_decode, "payload"_a, "bits"_a, "words"_a, Unlocked());
}

void def_gossip(nb::module_& m) {
    m.def("modular_encode", &modular_encode, "xs"_a, "out"_a, "key"_a, "bits"_a, "modulus"_a, Unlocked());
    m.def("modular_sums", &modular_sums, "own"_a, "theirs"_a, "numel"_a, "key"_a, "bits"_a, Unlocked());
    m.def("modular_add", &modular_add, "outs"_a, "payloads"_a, "weights"_a, "bits"_a, Unlocked());
    m.def("modular_recover_add", &modular_recover_add, "outs"_a, "own"_a, "payloads"_a, "weights"_a, "bits"_a,
          "modulus"_a, Unlocked());
    m.def("difference_encode", &difference_encode, "xs"_a, "ys"_a, "sum"_a, "out"_a, "keys"_a, "quantizer"_a,
          "measured"_a, Unlocked());
    m.def("dense_sums", &dense_sums, "vs"_a, "cs"_a, Unlocked());
    m.def("choco_decode_add", &choco_decode_add, "xs"_a, "hs"_a, "gaps"_a, "payloads"_a, "factors"_a, "weights"_a,
          "step"_a, "quantizer"_a, Unlocked());
    m.def("choco_dense_add", &choco_dense_add, "xs"_a, "hs"_a, "gaps"_a, "vectors"_a, "weights"_a, "step"_a, Unlocked());
    m.def("squeeze_decode_add", &squeeze_decode_add, "xs"_a, "losts"_a, "payloads"_a, "factors"_a, "weights"_a,
          "step"_a, "quantizer"_a, Unlocked());
    m.def("low_rank_products", &low_rank_products, "xs"_a, "rows"_a, "ps"_a, "left"_a, "outs"_a, Unlocked());
    m.def("low_rank_add", &low_rank_add, "xs"_a, "rows"_a, "a"_a, "b"_a, Unlocked());
    m.def("low_rank_add_products", &low_rank_add_products, "gs"_a, "es"_a, "factor"_a, "rows"_a, "ps"_a, "xs"_a,
          "outs"_a, Unlocked());
    m.def("low_rank_orthonormal", &low_rank_orthonormal, "xs"_a, "rank"_a, "n"_a, "out"_a, Unlocked());
    m.def("low_rank_store", &low_rank_store, "xs"_a, "rows"_a, "a"_a, "b"_a, Unlocked());
    m.def("mix_add", &mix_add, "outs"_a, "own"_a, "theirs"_a, "weights"_a, "own_weight"_a, Unlocked());
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "Kernels for tensors in main memory; `thinwire.kernels` documents them.";
    def_records(m);
    def_quantizers(m);
    def_selection(m);
    def_indices(m);
    def_gossip(m);
    m.def("uniform", &thinwire::uniform, "key"_a, "out"_a, Unlocked());
    m.def("chunk_norms", &chunk_norms, "xs"_a, "chunk"_a, "norms"_a, Unlocked());
    m.def("all_finite", &all_finite, "xs"_a, Unlocked());
    m.def("set_threads", &thinwire::set_threads, "number"_a);
    m.def("threads", &thinwire::threads);
}
