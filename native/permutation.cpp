// Uniformly random subsets: exactly k of n indices, in time k. A keyed Feistel network permutes the 2^b numbers around n.
// The first k numbers are followed through it until they fall below n, so they are distinct; a bitmap sorts them.
#include <algorithm>

#include "compact.hpp"
#include "kernels.hpp"
#include "random.hpp"

namespace thinwire {

namespace {

constexpr int kRounds = 6, kMinBits = 8;
constexpr size_t kBatch = 256;

struct Feistel {
    Key key;
    int high_bits, low_bits;  // of the two halves, at most 16

    Feistel(uint64_t k, size_t numel) : key(k) {
        int bits = kMinBits;
        while (numel > (size_t{1} << bits)) ++bits;
        low_bits = bits / 2;
        high_bits = bits - low_bits;
    }
};

// Replaces `size` numbers by their images.
THINWIRE_CLONES void permute(const Feistel f, uint32_t* numbers, size_t size) {
    const int low_bits = f.low_bits, high_shift = 32 - f.high_bits, low_shift = 32 - f.low_bits;
    for (size_t i = 0; i < size; ++i) {
        uint32_t high = numbers[i] >> low_bits, low = numbers[i] & ((1u << low_bits) - 1);
        for (uint32_t round = 0; round < kRounds; round += 2) {
            high ^= hash_of(f.key, counter_at(f.key, round << 16 | low)) >> high_shift;
            low ^= hash_of(f.key, counter_at(f.key, (round + 1) << 16 | high)) >> low_shift;
        }
        numbers[i] = high << low_bits | low;
    }
}

// Sets the bits of the images of 0..count-1 in a bitmap of n bits. Numbers that fall outside go on in the next batch; they
// set bit n, since a quarter of all falls outside and a branch would often be mispredicted.
void mark(const Feistel& f, size_t count, size_t numel, std::vector<uint64_t>& bitmap) {
    uint32_t numbers[kBatch];
    size_t next = 0, left = 0;
    while (next < count || left > 0) {
        while (left < kBatch && next < count) numbers[left++] = static_cast<uint32_t>(next++);
        permute(f, numbers, left);
        size_t outside = 0;
        for (size_t i = 0; i < left; ++i) {
            const uint32_t number = numbers[i], bit = std::min(number, static_cast<uint32_t>(numel));
            bitmap[bit / 64] |= uint64_t{1} << (bit % 64);
            numbers[outside] = number;
            outside += number >= numel;
        }
        left = outside;
    }
}

}  // namespace

void random_indices(const Keys& keys, const Counts& counts, const Counts& numels, IndicesOut out) {
    int32_t* indices = out.data;
    size_t total = out.numel;
    require(keys.size() == counts.size() && counts.size() == numels.size(), "counts: expected one per segment");
    std::vector<uint64_t> bitmap;
    for (size_t s = 0; s < counts.size(); ++s) {
        require(numels[s] >= 0 && numels[s] <= INT32_MAX, "numels: expected 0 to 2^31 - 1");
        require(counts[s] >= 0 && counts[s] <= numels[s], "counts: expected 0 to the segment's elements");
        const size_t numel = static_cast<size_t>(numels[s]), count = static_cast<size_t>(counts[s]);
        require(count <= total, "indices: fewer than the sum of counts");
        const bool excludes = 2 * count > numel;  // then fewer are left out than kept
        bitmap.assign(numel / 64 + 1, 0);
        mark(Feistel(keys[s], numel), excludes ? numel - count : count, numel, bitmap);
        if (excludes)
            for (uint64_t& word : bitmap) word = ~word;
        positions_of_bits(reinterpret_cast<const uint8_t*>(bitmap.data()), numel, indices, count);
        indices += count;
        total -= count;
    }
    require(total == 0, "indices: more than the sum of counts");
}

}  // namespace thinwire
