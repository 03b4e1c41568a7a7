// Packs codes of b bits, one per byte, to a little-endian bit stream, and back: eight codes take b bytes.
#pragma once

#include <type_traits>

#include "platform.hpp"

namespace thinwire {

constexpr uint64_t kLow8 = 0x00ff00ff00ff00ffu, kLow16 = 0x0000ffff0000ffffu, kLow32 = 0x00000000ffffffffu;

// Packs eight bytes of b-bit codes to 8b bits: at three widths, odd fields move next to even ones.
template <int bits>
THINWIRE_INLINE uint64_t squeeze(uint64_t w) {
    w = (w & kLow8) | ((w & ~kLow8) >> (8 - bits));
    w = (w & kLow16) | ((w & ~kLow16) >> (16 - 2 * bits));
    return (w & kLow32) | ((w & ~kLow32) >> (32 - 4 * bits));
}

constexpr uint64_t repeat(uint64_t field, int every) {
    uint64_t all = 0;
    for (int at = 0; at < 64; at += every) all |= field << at;
    return all;
}

template <int bits>
THINWIRE_INLINE uint64_t spread(uint64_t w) {
    constexpr uint64_t four = (uint64_t{1} << (4 * bits)) - 1;
    constexpr uint64_t two = repeat((uint64_t{1} << (2 * bits)) - 1, 32);
    constexpr uint64_t one = repeat((uint64_t{1} << bits) - 1, 16);
    w = (w & four) | ((w & (four << (4 * bits))) << (32 - 4 * bits));
    w = (w & two) | ((w & (two << (2 * bits))) << (16 - 2 * bits));
    return (w & one) | ((w & (one << bits)) << (8 - bits));
}

constexpr size_t kChunk = 512;  // codes per chunk, a multiple of 8; small enough for the first-level cache

// If b bytes are the size of an integer type, whole vectors are read and written.
template <int bits>
constexpr bool kWhole = bits == 1 || bits == 2 || bits == 4;
template <int bits>
using Group = std::conditional_t<bits == 1, uint8_t, std::conditional_t<bits == 2, uint16_t, uint32_t>>;

// Writes (n * bits + 7) / 8 bytes. `codes` has kChunk elements, with zeros from n to the next multiple of 8.
template <int bits>
THINWIRE_INLINE void pack_chunk(const uint8_t* codes, size_t n, uint8_t* out) {
    const size_t full = n / 8;
    if constexpr (kWhole<bits>) {
        for (size_t i = 0; i < full; ++i)
            store(out + bits * i, static_cast<Group<bits>>(squeeze<bits>(load<uint64_t>(codes + 8 * i))));
    } else {
        uint64_t words[kChunk / 8];
        for (size_t i = 0; i < full; ++i) words[i] = squeeze<bits>(load<uint64_t>(codes + 8 * i));
        size_t i = 0;
        // Storing eight bytes instead of b is safe, because the next word overwrites the rest.
        for (; i * bits + 8 <= full * bits; ++i) store(out + i * bits, words[i]);
        for (; i < full; ++i) std::memcpy(out + i * bits, &words[i], bits);
    }
    if (n % 8) {
        const uint64_t last = squeeze<bits>(load<uint64_t>(codes + 8 * full));
        std::memcpy(out + full * bits, &last, (n % 8 * bits + 7) / 8);
    }
}

// Reads (n * bits + 7) / 8 bytes, writes n codes rounded up to a multiple of 8.
template <int bits>
THINWIRE_INLINE void unpack_chunk(const uint8_t* in, size_t n, uint8_t* codes) {
    const size_t full = n / 8;
    if constexpr (kWhole<bits>) {
        for (size_t i = 0; i < full; ++i) store(codes + 8 * i, spread<bits>(load<Group<bits>>(in + bits * i)));
    } else {
        uint64_t words[kChunk / 8] = {};
        size_t i = 0;
        for (; i * bits + 8 <= full * bits; ++i) words[i] = load<uint64_t>(in + i * bits);
        for (; i < full; ++i) std::memcpy(&words[i], in + i * bits, bits);
        for (i = 0; i < full; ++i) store(codes + 8 * i, spread<bits>(words[i]));
    }
    if (n % 8) {
        uint64_t last = 0;
        std::memcpy(&last, in + full * bits, (n % 8 * bits + 7) / 8);
        store(codes + 8 * full, spread<bits>(last));
    }
}

// Codes of 9 to 16 bits, one per 16-bit word: four codes take 4b bits, and two such words take b bytes.
template <int bits>
THINWIRE_INLINE uint64_t squeeze_wide(uint64_t w) {
    w = (w & kLow16) | ((w & ~kLow16) >> (16 - bits));
    return (w & kLow32) | ((w & ~kLow32) >> (32 - 2 * bits));
}

template <int bits>
THINWIRE_INLINE uint64_t spread_wide(uint64_t w) {
    constexpr uint64_t two = (uint64_t{1} << (2 * bits)) - 1;
    constexpr uint64_t one = repeat((uint64_t{1} << bits) - 1, 32);
    w = (w & two) | ((w << (32 - 2 * bits)) & (two << 32));
    return (w & one) | ((w & (one << bits)) << (16 - bits));
}

// Writes the b bytes of eight codes, given as two words of four: low first.
template <int bits>
THINWIRE_INLINE void store_wide(uint8_t* out, uint64_t low, uint64_t high) {
    store(out, low | high << 4 * bits);
    high >>= 64 - 4 * bits;
    std::memcpy(out + 8, &high, bits - 8);
}

template <int bits>
THINWIRE_INLINE void pack_wide(const uint16_t* codes, size_t n, uint8_t* out) {
    uint64_t words[kChunk / 4];
    const size_t full = n / 8;
    const uint8_t* from = reinterpret_cast<const uint8_t*>(codes);
    for (size_t i = 0; i < (n + 7) / 8 * 2; ++i) words[i] = squeeze_wide<bits>(load<uint64_t>(from + 8 * i));
    for (size_t i = 0; i < full; ++i) store_wide<bits>(out + bits * i, words[2 * i], words[2 * i + 1]);
    if (n % 8) {
        uint8_t last[16];
        store_wide<bits>(last, words[2 * full], words[2 * full + 1]);
        std::memcpy(out + full * bits, last, (n % 8 * bits + 7) / 8);
    }
}

template <int bits>
THINWIRE_INLINE void load_wide(const uint8_t* in, uint64_t* words) {
    const uint64_t low = load<uint64_t>(in);
    uint64_t high = 0;
    std::memcpy(&high, in + 8, bits - 8);
    words[0] = low;  // bits above its 4b bits are cleared when it is spread
    words[1] = low >> 4 * bits | high << (64 - 4 * bits);
}

template <int bits>
THINWIRE_INLINE void unpack_wide(const uint8_t* in, size_t n, uint16_t* codes) {
    uint64_t words[kChunk / 4];
    const size_t full = n / 8;
    for (size_t i = 0; i < full; ++i) load_wide<bits>(in + bits * i, words + 2 * i);
    if (n % 8) {
        uint8_t last[16] = {};
        std::memcpy(last, in + full * bits, (n % 8 * bits + 7) / 8);
        load_wide<bits>(last, words + 2 * full);
    }
    uint8_t* to = reinterpret_cast<uint8_t*>(codes);
    for (size_t i = 0; i < (n + 7) / 8 * 2; ++i) store(to + 8 * i, spread_wide<bits>(words[i]));
}

THINWIRE_INLINE void pack_codes(int bits, const uint16_t* codes, size_t n, uint8_t* out) {
    switch (bits) {
        case 9: return pack_wide<9>(codes, n, out);
        case 10: return pack_wide<10>(codes, n, out);
        case 11: return pack_wide<11>(codes, n, out);
        case 12: return pack_wide<12>(codes, n, out);
        case 13: return pack_wide<13>(codes, n, out);
        case 14: return pack_wide<14>(codes, n, out);
        case 15: return pack_wide<15>(codes, n, out);
        default: std::memcpy(out, codes, 2 * n);
    }
}

THINWIRE_INLINE void unpack_codes(int bits, const uint8_t* in, size_t n, uint16_t* codes) {
    switch (bits) {
        case 9: return unpack_wide<9>(in, n, codes);
        case 10: return unpack_wide<10>(in, n, codes);
        case 11: return unpack_wide<11>(in, n, codes);
        case 12: return unpack_wide<12>(in, n, codes);
        case 13: return unpack_wide<13>(in, n, codes);
        case 14: return unpack_wide<14>(in, n, codes);
        case 15: return unpack_wide<15>(in, n, codes);
        default: std::memcpy(codes, in, 2 * n);
    }
}

THINWIRE_INLINE void pack_codes(int bits, const uint8_t* codes, size_t n, uint8_t* out) {
    switch (bits) {
        case 1: return pack_chunk<1>(codes, n, out);
        case 2: return pack_chunk<2>(codes, n, out);
        case 3: return pack_chunk<3>(codes, n, out);
        case 4: return pack_chunk<4>(codes, n, out);
        case 5: return pack_chunk<5>(codes, n, out);
        case 6: return pack_chunk<6>(codes, n, out);
        case 7: return pack_chunk<7>(codes, n, out);
        default: std::memcpy(out, codes, n);
    }
}

THINWIRE_INLINE void unpack_codes(int bits, const uint8_t* in, size_t n, uint8_t* codes) {
    switch (bits) {
        case 1: return unpack_chunk<1>(in, n, codes);
        case 2: return unpack_chunk<2>(in, n, codes);
        case 3: return unpack_chunk<3>(in, n, codes);
        case 4: return unpack_chunk<4>(in, n, codes);
        case 5: return unpack_chunk<5>(in, n, codes);
        case 6: return unpack_chunk<6>(in, n, codes);
        case 7: return unpack_chunk<7>(in, n, codes);
        default: std::memcpy(codes, in, n);
    }
}

}  // namespace thinwire
