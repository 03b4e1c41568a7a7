// What depends on the compiler: run-time dispatch, inlining, vectorisation hints, and reading floats as integers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(_MSC_VER)
#include <intrin.h>
#endif

// Compiles a function once per instruction set and picks at load time. Empty where CMake found no support.
// The attribute does not reach into callees, so all that such a function calls in a loop is THINWIRE_INLINE.
#if defined(THINWIRE_TARGET_CLONES)
#define THINWIRE_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define THINWIRE_CLONES
#endif

#if defined(_MSC_VER)
#define THINWIRE_INLINE __forceinline
#else
#define THINWIRE_INLINE inline __attribute__((always_inline))
#endif

// The loop's iterations are independent though its pointers may be equal (a residual may be its own input).
#if defined(__clang__)
#define THINWIRE_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define THINWIRE_INDEPENDENT _Pragma("GCC ivdep")
#elif defined(_MSC_VER)
#define THINWIRE_INDEPENDENT __pragma(loop(ivdep))
#else
#define THINWIRE_INDEPENDENT
#endif

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "thinwire's payloads are little endian, and so must be the machine"
#endif

namespace thinwire {

constexpr int32_t kInfinityBits = 0x7f800000;

// Bits of |x|: as integers, magnitudes order as finite < infinity < NaN.
THINWIRE_INLINE int32_t magnitude(float x) {
    int32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits & 0x7fffffff;
}

THINWIRE_INLINE int32_t sign_bit(float x) {
    int32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits & INT32_MIN;
}

THINWIRE_INLINE float float_from_bits(int32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// Position of the lowest set bit; there is one.
THINWIRE_INLINE int lowest_bit(uint64_t bits) {
#if defined(_MSC_VER)
    unsigned long at;
    _BitScanForward64(&at, bits);
    return static_cast<int>(at);
#else
    return __builtin_ctzll(bits);
#endif
}

// Asks for memory that is needed soon, so that it arrives while there is other work.
template <typename T>
THINWIRE_INLINE void prefetch(const T* x, size_t n) {
#if defined(__GNUC__)
    for (size_t i = 0; i < n; i += 64 / sizeof(T)) __builtin_prefetch(x + i);
#else
    (void)x, (void)n;
#endif
}

template <typename T>
THINWIRE_INLINE T load(const uint8_t* p) {
    T value;
    std::memcpy(&value, p, sizeof value);
    return value;
}

template <typename T>
THINWIRE_INLINE void store(uint8_t* p, T value) {
    std::memcpy(p, &value, sizeof value);
}

}  // namespace thinwire
