// Calls every kernel from several threads at once, under a sanitizer: `scripts/sanitize.sh` builds and runs it.
//
// The threads read the same inputs and payloads and write to buffers of their own. Each kernel may split its work over
// threads too. The driver ends with an error if a result differs from that of a single thread; the sanitizer ends it at a
// data race, a wrong address or undefined behaviour.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>
#include <thread>

#include "data.hpp"
#include "gossip_cases.hpp"

namespace {

constexpr size_t kThreads = 4, kRounds = 2;
constexpr int kThreadsOfKernels = 3;

// ---- cases: each calls the kernels of one family and returns what they wrote ----

using Case = std::function<Data()>;

struct Named {
    std::string name;
    Case run;
};

// Encodes with residuals, then decodes. `Encode(Bytes, Outputs)`, `Decode(Payload, Outputs)`.
template <typename Encode, typename Decode>
Data round_trip(size_t nbytes, Encode encode, Decode decode) {
    Message message(nbytes), plain(nbytes);
    Floats residuals(kNumels), decoded(kNumels, 1.0f);
    encode(message.bytes(), residuals.outputs());
    encode(plain.bytes(), Outputs{});
    decode(message.payload(), decoded.outputs());
    return joined(message, plain, residuals, decoded);
}

Data quantized(const Quantizers& q) {
    const Inputs xs = kGradients.inputs();
    size_t nbytes = 0;
    for (size_t s = 0; s < xs.size(); ++s) {
        const Buckets& buckets = q.distinct[q.which.empty() ? 0 : q.which[s]].buckets;
        nbytes += codes_nbytes(buckets, sizeof(float), {kNumels[s]});
    }
    Data all = round_trip(
        nbytes, [&](Bytes out, const Outputs& rest) { quantize_encode(xs, out, kKeys, q, rest); },
        [&](Payload payload, const Outputs& outs) { quantize_decode_add(payload, outs, kWeight, q); });
    Message first(nbytes), second(first);
    quantize_encode(xs, first.bytes(), kKeys, q, {});
    quantize_encode(kMomenta.inputs(), second.bytes(), kKeys, q, {});
    Floats total(kNumels);
    const bool finite = quantize_decode_sum({first.payload(), second.payload()}, total.outputs(), kWeight, q);
    append(all, joined(total, finite));
    return all;
}

Data levelled(const Levels& levels) {
    return round_trip(
        codes_nbytes(levels.buckets),
        [&](Bytes out, const Outputs& rest) { levels_encode(kGradients.inputs(), out, kKeys, levels, rest); },
        [&](Payload payload, const Outputs& outs) { levels_decode_add(payload, outs, kWeight, levels); });
}

Levels even_levels(int bits, bool l2) {
    Levels levels{{bits, 512, l2}, {}};
    const int steps = (1 << bits) - 1;
    for (int i = 0; i <= steps; ++i) levels.values.push_back(-1.0f + 2.0f * static_cast<float>(i) / static_cast<float>(steps));
    return levels;
}

Levels powers_of_two(int bits) {
    Levels levels{{bits, 512, false}, {0.0f}};
    for (float power = 1.0f; levels.values.size() + 1 < size_t{1} << bits; power /= 2)
        levels.values.push_back(power), levels.values.push_back(-power);
    std::sort(levels.values.begin(), levels.values.end());
    return levels;
}

Data signs(std::optional<float> scale) {
    return round_trip(
        codes_nbytes({1, std::numeric_limits<int32_t>::max(), false}) + sizeof(float),  // the empty segment has a scale
        [&](Bytes out, const Outputs& rest) { sign_encode(kGradients.inputs(), out, rest, scale); },
        [&](Payload payload, const Outputs& outs) { sign_decode_add(payload, outs, kWeight); });
}

Data two_means(size_t bucket_size) {
    return round_trip(
        codes_nbytes({1, bucket_size, false}, 2 * sizeof(float)),
        [&](Bytes out, const Outputs& rest) { onebit_encode(kGradients.inputs(), out, bucket_size, rest); },
        [&](Payload payload, const Outputs& outs) { onebit_decode_add(payload, outs, kWeight, bucket_size); });
}

Data bin_means(int bits, size_t bucket_size) {
    return round_trip(
        codes_nbytes({bits, bucket_size, false}, sizeof(float) << bits),
        [&](Bytes out, const Outputs& rest) { bin_means_encode(kGradients.inputs(), out, bits, bucket_size, rest); },
        [&](Payload payload, const Outputs& outs) { bin_means_decode_add(payload, outs, kWeight, bits, bucket_size); });
}

Data rounded(FloatType type) {
    const bool wide = type == FloatType::kBFloat16 || type == FloatType::kFloat16;
    const size_t elements = static_cast<size_t>(sum(kNumels));
    return round_trip(
        wide ? 2 * elements : elements + sizeof(float) * kNumels.size(),
        [&](Bytes out, const Outputs& rest) { cast_encode(kGradients.inputs(), out, type, rest); },
        [&](Payload payload, const Outputs& outs) { cast_decode_add(payload, outs, kWeight, type); });
}

// Digits of `base` in a word: five of base 3 in a byte, else as many as an int32 holds.
Data ternary(int base, size_t bucket_size, float clip) {
    const Inputs xs = kGradients.inputs();
    std::vector<float> scales(num_buckets(bucket_size));
    ternary_scales(xs, clip, bucket_size, {scales.data(), scales.size()});
    size_t digits = 5;
    if (base > 3) {
        digits = 0;
        for (int64_t power = base; power <= (int64_t{1} << 31); power *= base) ++digits;
    }
    const size_t nbytes = num_buckets(digits) * (base == 3 ? 1 : sizeof(int32_t));
    Data all = round_trip(
        nbytes,
        [&](Bytes out, const Outputs& rest) {
            ternary_encode(xs, {scales.data(), scales.size()}, out, kKeys, {base, bucket_size}, rest);
        },
        [&](Payload payload, const Outputs& outs) {
            ternary_decode_add(payload, {scales.data(), scales.size()}, outs, kWeight, {base, bucket_size});
        });
    append(all, scales);
    return all;
}

// `packed` in a Huffman code, and decoded again.
Data entropy_coded(int bits) {
    const Buckets buckets{bits, 512, false};
    Message coded(codes_nbytes(buckets));
    quantize_encode(kGradients.inputs(), coded.bytes(), kKeys, {{{buckets, (1 << bits) - 1}}, {}}, {});
    const size_t scales = sizeof(float) * num_buckets(buckets.size);
    const Payload packed{coded.payload().data + scales, coded.payload().numel - scales};
    Message room(packed.numel + 9), back(packed.numel);
    const size_t nbytes = huffman_encode(packed, kNumels, bits, room.bytes());
    huffman_decode({room.payload().data, nbytes}, kNumels, bits, back.bytes());
    return joined(room, back);
}

Data top_elements() {
    const Inputs xs = kGradients.inputs();
    Selected kept = selected();
    const size_t chunk = 512;
    Counts last_counts;
    int64_t in_chunks = 0;
    for (const int64_t n : kNumels) {
        last_counts.push_back(n % chunk > 0);
        in_chunks += 5 * static_cast<int64_t>(n / chunk) + last_counts.back();
    }
    Selected chunks(static_cast<size_t>(in_chunks));
    topk_in_chunks(xs, chunk, 5, last_counts, chunks.indices_out(), chunks.values_out());
    Selection above_threshold = above(xs, std::vector<float>(xs.size(), 0.06f));
    Data all = joined(kept, chunks, largest(xs), above_threshold.counts);
    append(all, std::vector<float>(above_threshold.values.get(), above_threshold.values.get() + above_threshold.numel));
    return all;
}

Data scattered() {
    Floats written(kNumels), added(kNumels), cleared = kGradients;
    Selected gathered(kSelected.indices.size()), marked(gathered);
    const Input values{kSelected.values.data(), kSelected.values.size()};
    scatter_write(written.outputs(), kSelected.chosen(), values, kCounts);
    scatter_add(added.outputs(), kSelected.chosen(), values, kCounts, kWeight);
    scatter_clear(cleared.outputs(), kSelected.chosen(), kCounts);
    gather(kGradients.inputs(), kSelected.chosen(), gathered.values_out(), kCounts);
    gather_marked(kGradients.inputs(), kSelected.chosen(), marked.values_out(), kCounts);
    Selected other(kSelected.indices.size());
    topk(kMomenta.inputs(), kCounts, other.indices_out(), other.values_out());
    Floats total(kNumels, 1.0f);
    const bool finite = scatter_total(total.outputs(), {kSelected.chosen(), other.chosen()},
                                      {values, {other.values.data(), other.values.size()}}, {kCounts, kCounts}, kWeight);
    return joined(written, added, cleared, gathered, marked, total, finite);
}

Data index_message() {
    size_t nbytes = 0;
    for (const IndexCode& code : checked_codes(kCounts, kNumels, kSelected.indices.size())) nbytes += code.nbytes();
    Message message(nbytes);
    indices_encode(kSelected.chosen(), kCounts, kNumels, message.bytes());
    return {message.memory.begin() + 1, message.memory.end()};
}

using DecodeIndices = void (*)(Payload, const Counts&, const Counts&, IndicesOut);

// Decodes the code, then the same with each of many bits flipped: a decoder may throw, but not touch other memory.
Data decoded_indices(const Data& code, DecodeIndices decode) {
    Data all = code;
    for (size_t flip = 0; flip <= 200; ++flip) {
        Data damaged = code;
        if (flip > 0) damaged[flip * 7919 % code.size()] ^= static_cast<uint8_t>(1 << flip % 8);
        const Message message(damaged);
        Selected back(kSelected.indices.size());
        try {
            decode(message.payload(), kCounts, kNumels, back.indices_out());
            append(all, back.indices);
        } catch (const std::invalid_argument& error) {
            if (flip == 0) throw;
            append(all, std::vector<char>(error.what(), error.what() + std::strlen(error.what())));
        }
    }
    return all;
}

Data random_and_words() {
    Selected drawn(static_cast<size_t>(sum(kCounts))), back(drawn.indices.size());
    random_indices(kKeys, kCounts, kNumels, drawn.indices_out());
    const int bits = 14;
    Message message((drawn.indices.size() * bits + 7) / 8);
    words_encode(drawn.chosen(), bits, message.bytes());
    words_decode(message.payload(), bits, back.indices_out());
    return joined(drawn, message, back);
}

Data momentum(Rule rule) {
    Floats us(kNumels), vs(kNumels), us_kept(kNumels), vs_kept(kNumels);
    const Inputs gs = kGradients.inputs(), old_us = kMomenta.inputs(), old_vs = kVelocities.inputs();
    const Momentum m{0.9f, 0.5f, rule};
    momentum_correct({gs, old_us, old_vs, us.outputs(), vs.outputs()}, m);
    Selected kept(static_cast<size_t>(sum(kCounts)));
    momentum_correct_topk({gs, old_us, old_vs, us_kept.outputs(), vs_kept.outputs()}, m, kCounts, kept.indices_out(),
                          kept.values_out());
    return joined(us, vs, us_kept, vs_kept, kept);
}

Data feedback(const Floats& gs, const Floats& es, const Counts& numels, const Counts& counts) {
    Floats outs(numels);
    Selected kept(static_cast<size_t>(sum(counts)));
    add_topk(gs.inputs(), es.inputs(), outs.outputs(), 0.5f, counts, kept.indices_out(), kept.values_out());
    return joined(outs, kept);
}

Data reduced() {
    const size_t chunk = 100;
    std::vector<float> norms(num_buckets(chunk));
    chunk_norms(kGradients.inputs(), chunk, {norms.data(), norms.size()});
    Floats infinite = kGradients;
    infinite.segments[0].back() = INFINITY;
    return joined(norms, all_finite(kGradients.inputs()), all_finite(infinite.inputs()));
}

std::vector<Named> cases() {
    std::vector<Named> all;
    for (const int bits : {1, 2, 3, 4, 8, 11, 16})
        for (const bool l2 : {false, true}) {
            const std::string name = std::to_string(bits) + (l2 ? " bits, l2" : " bits, max");
            all.push_back({"quantize " + name, [=] { return quantized({{{{bits, 512, l2}, (1 << bits) - 1}}, {}}); }});
            if (bits <= 8) all.push_back({"levels " + name, [=] { return levelled(even_levels(bits, l2)); }});
        }
    const Quantizers mixed{{{{4, 512, false}, 14}, {{2, 100, true}, 3}, {{12, 64, false}, 4000}}, {0, 1, 0, 2, 1}};
    all.push_back({"quantize, by segment", [=] { return quantized(mixed); }});
    for (const int bits : {3, 5, 8})
        all.push_back({"levels, powers of two", [=] { return levelled(powers_of_two(bits)); }});
    for (const int bits : {2, 4, 8}) all.push_back({"huffman", [=] { return entropy_coded(bits); }});
    all.push_back({"sign, mean scale", [] { return signs(std::nullopt); }});
    all.push_back({"sign, fixed scale", [] { return signs(0.5f); }});
    for (const size_t size : {size_t{512}, size_t{1} << 30}) {
        all.push_back({"onebit", [=] { return two_means(size); }});
        for (const int bits : {1, 2, 3, 8}) all.push_back({"bin_means", [=] { return bin_means(bits, size); }});
        for (const int base : {3, 5, 17}) all.push_back({"ternary", [=] { return ternary(base, size, 2.5f); }});
    }
    for (const auto type : {FloatType::kBFloat16, FloatType::kFloat16, FloatType::kE4M3, FloatType::kE5M2})
        all.push_back({"cast", [=] { return rounded(type); }});
    all.push_back({"select", top_elements});
    all.push_back({"scatter", scattered});
    all.push_back({"indices", [] { return decoded_indices(index_message(), indices_decode); }});
    all.push_back({"smallest", [] {
        return decoded_indices(smallest_encode(kSelected.chosen(), kCounts, kNumels), smallest_decode);
    }});
    all.push_back({"rice", [] {
        return decoded_indices(rice_encode(kSelected.chosen(), kCounts, kNumels), rice_decode);
    }});
    all.push_back({"random, words", random_and_words});
    for (const Rule rule : {Rule::plain, Rule::nesterov}) all.push_back({"momentum", [=] { return momentum(rule); }});
    all.push_back({"add_topk", [] { return feedback(kGradients, kVelocities, kNumels, kCounts); }});
    all.push_back({"add_topk, large", [] { return feedback(kLargeGradients, kLargeGradients, kLarge, {1000}); }});
    all.push_back({"reduce", reduced});
    for (const int bits : {1, 4, 11})
        for (const bool sum : {false, true})
            all.push_back({"difference", [=] { return differences({{bits, 512, sum}, (1 << bits) - 1}, sum); }});
    for (const int bits : {2, 5, 8}) all.push_back({"modular", [=] { return modular(bits); }});
    all.push_back({"dense, mix", dense_and_mixed});
    all.push_back({"low rank", low_rank});
    return all;
}

}  // namespace

int main() {
    const std::vector<Named> all = cases();
    std::vector<Data> expected;
    for (const Named& named : all) expected.push_back(named.run());

    set_threads(kThreadsOfKernels);
    std::atomic<size_t> num_wrong{0}, num_ready{0};
    std::vector<std::thread> callers;
    for (size_t id = 0; id < kThreads; ++id)
        callers.emplace_back([&, id] {
            for (++num_ready; num_ready < kThreads;) std::this_thread::yield();
            for (size_t round = 0; round < kRounds; ++round)  // all run the same kernel at once, then different ones
                for (size_t i = 0; i < all.size(); ++i) {
                    const size_t at = (i + round * id) % all.size();
                    if (all[at].run() == expected[at]) continue;
                    std::fprintf(stderr, "thread %zu: %s: differs from a single thread\n", id, all[at].name.c_str());
                    ++num_wrong;
                }
        });
    for (std::thread& caller : callers) caller.join();
    std::printf("%zu cases in %zu threads: %zu wrong\n", all.size(), kThreads, num_wrong.load());
    return num_wrong > 0;
}
