// Little-endian streams of words of up to 32 bits, which may start in the middle of a byte.
#pragma once

#include <algorithm>

#include "platform.hpp"

namespace thinwire {

// Keeps the bits that come before `bit` in its byte; the rest of memory is overwritten.
class BitWriter {
public:
    BitWriter(uint8_t* bytes, uint64_t bit) : at_(bytes + bit / 8), fill_(static_cast<int>(bit % 8)) {
        if (fill_) pending_ = *at_ & ((1u << fill_) - 1);
    }

    // `value` has no more than `width` bits.
    void put(uint32_t value, int width) {
        pending_ |= uint64_t{value} << fill_;
        fill_ += width;
        if (fill_ >= 32) {
            store(at_, static_cast<uint32_t>(pending_));
            at_ += 4;
            pending_ >>= 32;
            fill_ -= 32;
        }
    }

    void finish() {
        for (; fill_ > 0; fill_ -= 8, pending_ >>= 8) *at_++ = static_cast<uint8_t>(pending_);
    }

private:
    uint8_t* at_;
    uint64_t pending_ = 0;
    int fill_;
};

// Reads no byte at or behind `end`, as long as no more is asked for than lies before it.
class BitReader {
public:
    BitReader(const uint8_t* bytes, uint64_t bit, const uint8_t* end) : at_(bytes + bit / 8), end_(end) {
        if (bit % 8) {
            pending_ = *at_++ >> (bit % 8);
            fill_ = 8 - static_cast<int>(bit % 8);
        }
    }

    uint32_t get(int width) {
        if (fill_ < width) refill();
        const uint32_t value = static_cast<uint32_t>(pending_ & ((uint64_t{1} << width) - 1));
        pending_ >>= width;
        fill_ -= width;
        return value;
    }

private:
    void refill() {
        if (end_ - at_ >= 4) {
            pending_ |= uint64_t{load<uint32_t>(at_)} << fill_;
            at_ += 4;
            fill_ += 32;
        } else {
            for (; at_ < end_; fill_ += 8) pending_ |= uint64_t{*at_++} << fill_;
        }
    }

    const uint8_t* at_;
    const uint8_t* end_;
    uint64_t pending_ = 0;
    int fill_ = 0;
};

}  // namespace thinwire
