// What the driver's cases read, and how they return what their kernels wrote. The driver alone includes it.
#pragma once
#include <cstdint>
#include <vector>

#include "../indices.hpp"
#include "../kernels.hpp"
#include "buffers.hpp"

namespace {

using namespace thinwire;

constexpr float kWeight = 0.25f;
const Counts kNumels = {12345, 1, 0, 517, 6000};
const Counts kCounts = {123, 1, 0, 500, 600};  // selected of each segment
const Keys kKeys = {7, 8, 9, 10, 11};

struct Selected {
    std::vector<int32_t> indices;
    std::vector<float> values;

    explicit Selected(size_t count) : indices(count), values(count) {}
    Indices chosen() const { return {indices.data(), indices.size()}; }
    IndicesOut indices_out() { return {indices.data(), indices.size()}; }
    Output values_out() { return {values.data(), values.size()}; }
};

int64_t sum(const Counts& counts) {
    int64_t total = 0;
    for (const int64_t n : counts) total += n;
    return total;
}

// ---- what a case returns: all that its kernels wrote, as bytes ----

template <typename T>
void append(Data& data, const std::vector<T>& values) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(values.data());
    data.insert(data.end(), bytes, bytes + values.size() * sizeof(T));
}

void append(Data& data, const Floats& floats) {
    for (const auto& segment : floats.segments) append(data, segment);
}
void append(Data& data, const Message& message) { append(data, message.memory); }
void append(Data& data, const Selected& selected) {
    append(data, selected.indices);
    append(data, selected.values);
}
void append(Data& data, bool flag) { data.push_back(flag); }

template <typename... Parts>
Data joined(const Parts&... parts) {
    Data data;
    (append(data, parts), ...);
    return data;
}

// ---- inputs that all threads read ----

Floats gradients(const Counts& numels, uint64_t key) {
    Floats floats(numels);
    for (auto& segment : floats.segments) {
        uniform(key++, {segment.data(), segment.size()});
        for (float& x : segment) x = (x - 0.5f) * (x - 0.5f) * (x - 0.5f);  // many small, few large
    }
    return floats;
}

const Floats kGradients = gradients(kNumels, 1);
const Floats kMomenta = gradients(kNumels, 21);
const Floats kVelocities = gradients(kNumels, 41);
const Counts kLarge = {(1 << 20) + 7};  // so many elements are written past the cache
const Floats kLargeGradients = gradients(kLarge, 61);

Selected selected() {
    Selected kept(static_cast<size_t>(sum(kCounts)));
    topk(kGradients.inputs(), kCounts, kept.indices_out(), kept.values_out());
    return kept;
}

const Selected kSelected = selected();

// ---- sizes of payloads ----

size_t num_buckets(size_t size, const Counts& numels = kNumels) {
    size_t count = 0;
    for (const int64_t n : numels) count += (static_cast<size_t>(n) + size - 1) / size;
    return count;
}

size_t codes_nbytes(const Buckets& buckets, size_t scale_nbytes = sizeof(float), const Counts& numels = kNumels) {
    size_t nbytes = scale_nbytes * num_buckets(buckets.size, numels);
    for (const int64_t n : numels) nbytes += (static_cast<size_t>(n) * buckets.bits + 7) / 8;
    return nbytes;
}

}  // namespace
