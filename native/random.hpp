// The counter-based generator: a number is a function of a 64-bit key and a 32-bit position.
#pragma once

#include "platform.hpp"

namespace thinwire {

struct Key {
    uint32_t k0, k1;
    explicit Key(uint64_t key) : k0(static_cast<uint32_t>(key)), k1(static_cast<uint32_t>(key >> 32)) {}
};

// Where a position's counter starts; the next position's is kCounterStep more. Loops add instead of multiplying.
constexpr uint32_t kCounterStep = 0x9E3779B9u;

THINWIRE_INLINE uint32_t counter_at(Key key, uint32_t position) { return position * kCounterStep + key.k0; }

// The key whose position 0 is this key's `position`.
inline Key key_from(Key key, size_t position) {
    key.k0 = counter_at(key, static_cast<uint32_t>(position));
    return key;
}

constexpr uint32_t kFirstFactor = 0x7feb352du, kSecondFactor = 0x846ca68bu;

THINWIRE_INLINE uint32_t hash_of(Key key, uint32_t counter) {
    uint32_t h = counter;
    h = (h ^ (h >> 16)) * kFirstFactor;
    h = (h ^ (h >> 15) ^ key.k1) * kSecondFactor;
    return h ^ (h >> 16);
}

// A multiple of 2^-24 in [0, 1).
THINWIRE_INLINE float uniform_of(Key key, uint32_t counter) {
    return static_cast<float>(static_cast<int32_t>(hash_of(key, counter) >> 8)) * 0x1p-24f;
}

}  // namespace thinwire
