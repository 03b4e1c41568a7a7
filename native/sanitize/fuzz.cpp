// Gives damaged payloads to every decoder, under AddressSanitizer and UBSan: `fuzz [INPUTS [SEED]]`.
//
// A decoder may throw std::invalid_argument. It may not touch memory outside of its buffers, which end where their data
// ends. Sizes of segments, numbers of indices and the damage follow from the seed.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <stdexcept>
#include <string>

#include "../indices.hpp"
#include "buffers.hpp"

namespace {

using namespace thinwire;

constexpr size_t kInputsPerShape = 500;

// splitmix64
struct Random {
    uint64_t state;

    uint64_t next() {
        uint64_t z = (state += 0x9e3779b97f4a7c15);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
        z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
        return z ^ (z >> 31);
    }
    size_t below(size_t end) { return end ? static_cast<size_t>(next() % end) : 0; }
};

struct Shape {
    Counts numels, counts;  // elements, and indices among them
    Keys keys;

    size_t num_indices() const {
        size_t total = 0;
        for (const int64_t count : counts) total += static_cast<size_t>(count);
        return total;
    }
};

Shape random_shape(Random& random) {
    Shape shape;
    const size_t num_segments = 1 + random.below(4), limits[] = {2, 70, 600, 3000};
    for (size_t s = 0; s < num_segments; ++s) {
        const size_t numel = random.below(limits[random.below(4)]);
        const size_t most = random.below(2) ? numel : numel / 20;
        shape.numels.push_back(static_cast<int64_t>(numel));
        shape.counts.push_back(static_cast<int64_t>(random.below(most + 1)));
        shape.keys.push_back(random.next());
    }
    return shape;
}

// A decoder, a payload that its encoder wrote, and what it may throw.
struct Target {
    std::string name;
    Data valid;
    std::function<void(Payload)> decode;
};

using Targets = std::vector<Target>;

Data bytes_of(const Message& message) { return {message.memory.begin() + 1, message.memory.end()}; }

size_t num_buckets(const Shape& shape, size_t size) {
    size_t count = 0;
    for (const int64_t n : shape.numels) count += (static_cast<size_t>(n) + size - 1) / size;
    return count;
}

size_t codes_nbytes(const Shape& shape, int bits) {
    size_t nbytes = 0;
    for (const int64_t n : shape.numels) nbytes += (static_cast<size_t>(n) * bits + 7) / 8;
    return nbytes;
}

Floats gradients(const Shape& shape, Random& random) {
    Floats floats(shape.numels);
    for (auto& segment : floats.segments) {
        uniform(random.next(), {segment.data(), segment.size()});
        for (float& x : segment) x = (x - 0.5f) * (x - 0.5f) * (x - 0.5f);
    }
    return floats;
}

void add_quantizers(Targets& targets, const Shape& shape, const Floats& xs) {
    for (const int bits : {1, 4, 8, 12}) {
        const Quantizers q{{{{bits, 100, false}, (1 << bits) - 1}}, {}};
        Message message(4 * num_buckets(shape, 100) + codes_nbytes(shape, bits));
        quantize_encode(xs.inputs(), message.bytes(), shape.keys, q, {});
        targets.push_back({"quantize", bytes_of(message), [=](Payload payload) {
                               Floats outs(shape.numels);
                               quantize_decode_add(payload, outs.outputs(), 0.5f, q);
                               quantize_decode_sum({payload, payload}, outs.outputs(), 0.5f, q);
                           }});
    }
    for (const int bits : {2, 5}) {
        Levels levels{{bits, 64, true}, {}};
        for (int i = 0; i < (1 << bits) - 1; ++i) levels.values.push_back(-1.0f + static_cast<float>(i) / (1 << bits));
        Message message(4 * num_buckets(shape, 64) + codes_nbytes(shape, bits));
        levels_encode(xs.inputs(), message.bytes(), shape.keys, levels, {});
        targets.push_back({"levels", bytes_of(message), [=](Payload payload) {
                               Floats outs(shape.numels);
                               levels_decode_add(payload, outs.outputs(), 0.5f, levels);
                           }});
    }
}

void add_signs_and_casts(Targets& targets, const Shape& shape, const Floats& xs) {
    Message signs(4 * shape.numels.size() + codes_nbytes(shape, 1));
    sign_encode(xs.inputs(), signs.bytes(), {}, std::nullopt);
    targets.push_back({"sign", bytes_of(signs), [=](Payload payload) {
                           Floats outs(shape.numels);
                           sign_decode_add(payload, outs.outputs(), 0.5f);
                       }});
    Message means(8 * num_buckets(shape, 30) + codes_nbytes(shape, 1));
    onebit_encode(xs.inputs(), means.bytes(), 30, {});
    targets.push_back({"onebit", bytes_of(means), [=](Payload payload) {
                           Floats outs(shape.numels);
                           onebit_decode_add(payload, outs.outputs(), 0.5f, 30);
                       }});
    Message bins((sizeof(float) << 3) * num_buckets(shape, 30) + codes_nbytes(shape, 3));
    bin_means_encode(xs.inputs(), bins.bytes(), 3, 30, {});
    targets.push_back({"bin_means", bytes_of(bins), [=](Payload payload) {
                           Floats outs(shape.numels);
                           bin_means_decode_add(payload, outs.outputs(), 0.5f, 3, 30);
                       }});
    for (const auto type : {FloatType::kBFloat16, FloatType::kFloat16, FloatType::kE4M3, FloatType::kE5M2}) {
        const bool wide = type == FloatType::kBFloat16 || type == FloatType::kFloat16;
        Message message(codes_nbytes(shape, wide ? 16 : 8) + (wide ? 0 : 4 * shape.numels.size()));
        cast_encode(xs.inputs(), message.bytes(), type, {});
        targets.push_back({"cast", bytes_of(message), [=](Payload payload) {
                               Floats outs(shape.numels);
                               cast_decode_add(payload, outs.outputs(), 0.5f, type);
                           }});
    }
}

// Scales are payload too, as floats.
void add_ternary(Targets& targets, const Shape& shape, const Floats& xs) {
    for (const int base : {3, 7}) {
        const size_t bucket_size = 50, num_scales = num_buckets(shape, bucket_size);
        const Ternary ternary{base, bucket_size};
        size_t digits = 0, nbytes = 0;
        for (int64_t power = base; power <= (int64_t{1} << 31); power *= base) ++digits;
        for (const int64_t n : shape.numels)
            nbytes += base == 3 ? (static_cast<size_t>(n) + 4) / 5 : 4 * ((static_cast<size_t>(n) + digits - 1) / digits);
        std::vector<float> scales(num_scales);
        ternary_scales(xs.inputs(), 2.5f, bucket_size, {scales.data(), num_scales});
        Message message(nbytes);
        ternary_encode(xs.inputs(), {scales.data(), num_scales}, message.bytes(), shape.keys, ternary, {});
        Data valid(4 * num_scales);
        if (num_scales) std::memcpy(valid.data(), scales.data(), valid.size());
        const Data digits_of = bytes_of(message);
        valid.insert(valid.end(), digits_of.begin(), digits_of.end());
        targets.push_back({"ternary", valid, [=](Payload payload) {
                               const size_t split = std::min(payload.numel, 4 * num_scales);
                               std::vector<float> given(num_scales);
                               if (split) std::memcpy(given.data(), payload.data, split);
                               Floats outs(shape.numels);
                               ternary_decode_add({payload.data + split, payload.numel - split},
                                                  {given.data(), num_scales}, outs.outputs(), 0.5f, ternary);
                           }});
    }
}

void add_huffman(Targets& targets, const Shape& shape, const Floats& xs) {
    for (const int bits : {1, 4, 8}) {
        const size_t scales = 4 * num_buckets(shape, 512), nbytes = codes_nbytes(shape, bits);
        Message quantized(scales + nbytes), room(nbytes + 9);
        quantize_encode(xs.inputs(), quantized.bytes(), shape.keys, {{{{bits, 512, false}, (1 << bits) - 1}}, {}}, {});
        const size_t size =
            huffman_encode({quantized.payload().data + scales, nbytes}, shape.numels, bits, room.bytes());
        const uint8_t* coded = room.payload().data;
        targets.push_back({"huffman", Data(coded, coded + size), [=](Payload payload) {
                               Message packed(nbytes);
                               huffman_decode(payload, shape.numels, bits, packed.bytes());
                           }});
    }
}

// What decoders of indices accept must ascend inside its segment.
void check_indices(const std::vector<int32_t>& indices, const Shape& shape) {
    const int32_t* from = indices.data();
    for (size_t s = 0; s < shape.counts.size(); ++s) {
        check_ascending(from, static_cast<size_t>(shape.counts[s]), shape.numels[s]);
        from += shape.counts[s];
    }
}

void add_indices(Targets& targets, const Shape& shape, const Floats& xs) {
    const size_t count = shape.num_indices();
    std::vector<int32_t> kept(count);
    std::vector<float> values(count);
    topk(xs.inputs(), shape.counts, {kept.data(), count}, {values.data(), count});
    const Indices indices{kept.data(), count};
    const auto add = [&](const char* name, Data valid, void (*decode)(Payload, const Counts&, const Counts&, IndicesOut)) {
        targets.push_back({name, std::move(valid), [=](Payload payload) {
                               std::vector<int32_t> back(count);
                               decode(payload, shape.counts, shape.numels, {back.data(), count});
                               try {
                                   check_indices(back, shape);
                               } catch (const std::invalid_argument&) {
                                   throw std::logic_error("indices were accepted that do not ascend in their segment");
                               }
                           }});
    };
    size_t nbytes = 0;
    for (const IndexCode& code : checked_codes(shape.counts, shape.numels, count)) nbytes += code.nbytes();
    Message fixed(nbytes);
    indices_encode(indices, shape.counts, shape.numels, fixed.bytes());
    add("indices", bytes_of(fixed), indices_decode);
    add("smallest", smallest_encode(indices, shape.counts, shape.numels), smallest_decode);
    add("rice", rice_encode(indices, shape.counts, shape.numels), rice_decode);

    Message words(words_nbytes(count, 12));
    words_encode(indices, 12, words.bytes());
    targets.push_back({"words", bytes_of(words), [=](Payload payload) {
                           std::vector<int32_t> back(count);
                           words_decode(payload, 12, {back.data(), count});
                       }});
    Data raw(4 * count);
    if (count) std::memcpy(raw.data(), kept.data(), raw.size());
    targets.push_back({"scatter", raw, [=](Payload payload) {
                           std::vector<int32_t> given(count);
                           if (count) std::memcpy(given.data(), payload.data, std::min(payload.numel, 4 * count));
                           Floats outs(shape.numels);
                           scatter_add(outs.outputs(), {given.data(), count}, {values.data(), count}, shape.counts, 0.5f);
                       }});
    Data seeds(8 * shape.keys.size());
    std::memcpy(seeds.data(), shape.keys.data(), seeds.size());
    targets.push_back({"random indices", seeds, [=](Payload payload) {
                           Keys keys(shape.keys.size());
                           if (payload.numel) std::memcpy(keys.data(), payload.data, std::min(payload.numel, 8 * keys.size()));
                           std::vector<int32_t> drawn(count);
                           random_indices(keys, shape.counts, shape.numels, {drawn.data(), count});
                       }});
}

Targets make_targets(Random& random) {
    const Shape shape = random_shape(random);
    const Floats xs = gradients(shape, random);
    Targets targets;
    add_quantizers(targets, shape, xs);
    add_signs_and_casts(targets, shape, xs);
    add_ternary(targets, shape, xs);
    add_huffman(targets, shape, xs);
    add_indices(targets, shape, xs);
    return targets;
}

// Infinities, NaN, and integers at the ends of their range.
constexpr uint32_t kWords[] = {0, 1, 0x7fffffff, 0x80000000, 0xffffffff, 0x7f800000, 0xff800000, 0x7fc00000, 0x7f7fffff};

Data damaged(Data data, Random& random) {
    const size_t kind = random.below(8);
    if (kind == 0) data.resize(random.below(2 * data.size() + 9));
    if (kind == 1) data.resize(random.below(data.size() + 1));
    if (kind == 2) data.insert(data.begin(), 1 + random.below(8), static_cast<uint8_t>(random.next()));
    if (data.empty()) return data;
    if (kind == 0 || kind == 3)
        for (uint8_t& byte : data) byte = static_cast<uint8_t>(random.next());
    if (kind == 4 && data.size() >= 4) std::memcpy(data.data() + random.below(data.size() - 3), &kWords[random.below(9)], 4);
    if (kind == 5) {
        const size_t start = random.below(data.size());
        std::fill(data.begin() + static_cast<ptrdiff_t>(start), data.end(), random.below(2) ? 0xff : 0);
    }
    if (kind >= 6)
        for (size_t flips = 1 + random.below(8); flips > 0; --flips)
            data[random.below(data.size())] ^= static_cast<uint8_t>(1 << random.below(8));
    return data;
}

}  // namespace

int main(int argc, char** argv) {
    const size_t num_inputs = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 10000;
    const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 0;
    Random random{seed};
    Targets targets;
    size_t num_refused = 0;
    for (size_t i = 0; i < num_inputs; ++i) {
        if (i % kInputsPerShape == 0) targets = make_targets(random);
        const Target& target = targets[i % targets.size()];
        const Message message(damaged(target.valid, random));
        try {
            target.decode(message.payload());
        } catch (const std::invalid_argument&) {
            ++num_refused;
        } catch (const std::exception& error) {
            std::fprintf(stderr, "%s, input %zu of seed %llu: %s\n", target.name.c_str(), i,
                         static_cast<unsigned long long>(seed), error.what());
            return 1;
        }
    }
    std::printf("%zu damaged payloads of seed %llu: %zu refused, %zu decoded\n", num_inputs,
                static_cast<unsigned long long>(seed), num_refused, num_inputs - num_refused);
    return 0;
}
