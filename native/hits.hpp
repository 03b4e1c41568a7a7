// Which of 64 elements reach a threshold.
#pragma once

#include "pack.hpp"
#include "platform.hpp"

namespace thinwire {

constexpr size_t kBlock = 64;  // elements tested together; most blocks hold nothing

// Bit i tells whether the magnitude of x[i] reaches `threshold`; there are `size` <= kBlock elements.
THINWIRE_INLINE uint64_t hits_of_block(const float* x, size_t size, int32_t threshold) {
    alignas(64) uint8_t flags[kBlock] = {};
    if (size == kBlock)
        for (size_t i = 0; i < kBlock; ++i) flags[i] = magnitude(x[i]) >= threshold;
    else
        for (size_t i = 0; i < size; ++i) flags[i] = magnitude(x[i]) >= threshold;
    uint8_t hits[kBlock / 8];
    for (size_t i = 0; i < kBlock / 8; ++i) hits[i] = static_cast<uint8_t>(squeeze<1>(load<uint64_t>(flags + 8 * i)));
    return load<uint64_t>(hits);
}

}  // namespace thinwire
