// The driver's cases of gossip: what a worker sends, and what messages add to its values, damaged ones too.
#pragma once
#include "data.hpp"

namespace {

const std::vector<float> kFactors = {1.5f, 0.5f}, kWeights = {0.25f, -1.0f};
const std::vector<double> kExactWeights = {0.25, -1.0};

// Float64 segments, one after another.
struct Gaps {
    std::vector<double> flat = std::vector<double>(static_cast<size_t>(sum(kNumels)), 0.5);

    DoublesOut outputs() {
        DoublesOut views;
        double* begin = flat.data();
        for (const int64_t n : kNumels) views.push_back({begin, static_cast<size_t>(n)}), begin += n;
        return views;
    }
};

std::vector<float> flat(const Floats& floats) {
    std::vector<float> all;
    for (const auto& segment : floats.segments) all.insert(all.end(), segment.begin(), segment.end());
    return all;
}

Input vector_of(const std::vector<float>& values) { return {values.data(), values.size()}; }

// Damaged: some bytes are changed.
void damage(Message& message) {
    for (size_t i = 1; i < message.memory.size(); i += 97) message.memory[i] ^= 0xff;
}

Data differences(const Quantizer& q, bool sum) {
    Message own(codes_nbytes(q.buckets)), theirs(own);
    Floats ys = kMomenta;
    const std::vector<double> sums = difference_encode(kGradients.inputs(), ys.outputs(), sum, own.bytes(), kKeys, q, true);
    quantize_encode(kVelocities.inputs(), theirs.bytes(), kKeys, {{q}, {}}, {});
    damage(theirs);
    const Payloads payloads = {own.payload(), theirs.payload()};
    Floats xs(kNumels), hs = kMomenta, squeezed(kNumels), lost = kMomenta;
    Gaps gaps;
    choco_decode_add(xs.outputs(), hs.outputs(), gaps.outputs(), payloads, kFactors, kExactWeights, kWeight, q);
    squeeze_decode_add(squeezed.outputs(), lost.outputs(), payloads, kFactors, kWeights, kWeight, q);
    squeeze_decode_add(squeezed.outputs(), {}, payloads, kFactors, kWeights, kWeight, q);
    return joined(own, ys, sums, xs, hs, gaps.flat, squeezed, lost);
}

Data modular(int bits) {
    const size_t numel = static_cast<size_t>(sum(kNumels));
    const float modulus = 0.1f;
    Message own(sizeof(float) + ((numel + 1) * static_cast<size_t>(bits) + 7) / 8), theirs(own);
    const auto [check, largest] = modular_encode(kGradients.inputs(), own.bytes(), 7, bits, modulus);
    modular_encode(kMomenta.inputs(), theirs.bytes(), 7, bits, modulus);
    damage(theirs);
    const std::vector<int64_t> sums = modular_sums(own.payload(), theirs.payload(), numel, 7, bits);
    const Payloads payloads = {own.payload(), theirs.payload()};
    const std::vector<float> values = flat(kGradients);
    Floats added(kNumels), recovered(kNumels);
    modular_add(added.outputs(), payloads, {kWeight}, bits);
    const bool finite = modular_recover_add(recovered.outputs(), vector_of(values), payloads, {kWeight}, bits, modulus);
    return joined(own, std::vector<uint64_t>{check}, std::vector<float>{largest}, sums, added, recovered, finite);
}

Data dense_and_mixed() {
    const std::vector<float> a = flat(kGradients), b = flat(kMomenta), c = flat(kVelocities);
    Floats xs(kNumels), hs = kMomenta, mixed(kNumels);
    Gaps gaps;
    choco_dense_add(xs.outputs(), hs.outputs(), gaps.outputs(), {vector_of(a), vector_of(b)}, kExactWeights, kWeight);
    const bool finite = mix_add(mixed.outputs(), vector_of(a), {vector_of(b), vector_of(c)}, kWeights, kWeight);
    return joined(dense_sums(kGradients.inputs(), kMomenta.inputs()), xs, hs, gaps.flat, mixed, finite);
}

Data low_rank() {
    const Counts matrices = {96 * 70, 33 * 5, 7}, rows = {96, 33, 7}, of_rows = {2 * 96, 2 * 33, 2 * 7};
    const Counts of_columns = {2 * 70, 2 * 5, 2};
    const Floats xs = gradients(matrices, 81), as = gradients(of_rows, 91), bs = gradients(of_columns, 95);
    Floats left(of_columns), right(of_rows), moved = xs;
    low_rank_products(xs.inputs(), rows, as.inputs(), true, left.outputs());
    low_rank_products(xs.inputs(), rows, bs.inputs(), false, right.outputs());
    low_rank_add(moved.outputs(), rows, as.inputs(), bs.inputs());
    Floats sums(matrices), products(of_rows), stored(matrices);
    low_rank_add_products(moved.inputs(), xs.inputs(), 0.5f, rows, bs.inputs(), sums.outputs(), products.outputs());
    const bool finite = low_rank_store(stored.outputs(), rows, as.inputs(), bs.inputs());
    Floats bases({2 * 60, 3 * 3});
    low_rank_orthonormal(vector_of(flat(gradients({2 * 60}, 97))), 2, 60, bases.outputs()[0]);
    low_rank_orthonormal(vector_of(flat(gradients({4 * 3}, 98))), 4, 3, bases.outputs()[1]);
    return joined(left, right, moved, sums, products, stored, finite, bases);
}

}  // namespace
