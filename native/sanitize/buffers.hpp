// Buffers of exactly their size, so that a sanitizer sees the first byte beyond.
#pragma once

#include <cstring>
#include <vector>

#include "../kernels.hpp"

namespace thinwire {

using Data = std::vector<uint8_t>;

struct Floats {
    std::vector<std::vector<float>> segments;

    explicit Floats(const Counts& numels, float value = 0.0f) {
        for (const int64_t n : numels) segments.emplace_back(static_cast<size_t>(n), value);
    }
    Inputs inputs() const {
        Inputs views;
        for (const auto& s : segments) views.push_back({s.data(), s.size()});
        return views;
    }
    Outputs outputs() {
        Outputs views;
        for (auto& s : segments) views.push_back({s.data(), s.size()});
        return views;
    }
};

// Bytes at an odd address, as payloads inside a larger message may be.
struct Message {
    Data memory;

    explicit Message(size_t nbytes) : memory(nbytes + 1) {}
    explicit Message(const Data& bytes) : Message(bytes.size()) {
        if (!bytes.empty()) std::memcpy(memory.data() + 1, bytes.data(), bytes.size());
    }
    Bytes bytes() { return {memory.data() + 1, memory.size() - 1}; }
    Payload payload() const { return {memory.data() + 1, memory.size() - 1}; }
};

}  // namespace thinwire
