// Ascending indices, coded per segment by the smaller of Elias-Fano and a bitmap. A segment's code is one bit stream,
// padded with zeros to whole bytes. Elias-Fano: bit (index >> l) + j is set for the j-th index, then come the low l
// bits of each. Where none or all are kept there is nothing to code.
#include "indices.hpp"

#include "bitstream.hpp"
#include "compact.hpp"

namespace thinwire {

namespace {

IndexCode choose(uint64_t count, uint64_t numel) {
    if (count == 0 || count == numel) return {true, 0, 0, 0};
    IndexCode best{true, 0, numel, numel};
    bool first = true;
    uint64_t smallest = 0;
    for (int low = 0; low < 32 && (numel >> low) > 0; ++low) {
        const uint64_t marks = count + ((numel - 1) >> low), bits = count * low + marks;
        if (!first && bits >= smallest) continue;
        first = false;
        smallest = bits;
        if (bits < numel) best = {false, low, marks, bits};
    }
    return best;
}

// Sets one bit for each index, in memory that is zero: bit `index`, or (index >> low) + j for Elias-Fano. The word of the
// last bit is stored for every index, because a branch on whether it is complete would often be mispredicted.
void write_marks(const int32_t* indices, size_t count, const IndexCode& code, uint8_t* out) {
    const int low = code.bitmap ? 0 : code.low_bits;
    const uint64_t rank = code.bitmap ? 0 : 1, num_words = code.nbytes() / 8;
    uint64_t word = 0, at = 0;  // bits of bytes 8 at to 8 at + 7
    size_t j = 0;
    for (; j < count; ++j) {
        const uint64_t bit = (static_cast<uint64_t>(indices[j]) >> low) + rank * j;
        if (bit / 64 >= num_words) break;
        word = bit / 64 == at ? word : 0;
        at = bit / 64;
        word |= uint64_t{1} << (bit % 64);
        store(out + 8 * at, word);
    }
    for (; j < count; ++j) {  // of the last bytes, which are no word
        const uint64_t bit = (static_cast<uint64_t>(indices[j]) >> low) + rank * j;
        out[bit / 8] = static_cast<uint8_t>(out[bit / 8] | 1u << (bit % 8));
    }
}

constexpr int kMaxLowBits = 16;  // that are packed in chunks, a vector at a time
constexpr size_t kPackedNbytes = kChunk / 8 * kMaxLowBits;

THINWIRE_CLONES void pack_low(const int32_t* indices, size_t n, int bits, uint8_t* out) {
    const int32_t mask = (1 << bits) - 1;
    if (bits <= 8) {
        alignas(64) uint8_t codes[kChunk] = {};
        for (size_t j = 0; j < n; ++j) codes[j] = static_cast<uint8_t>(indices[j] & mask);
        pack_codes(bits, codes, n, out);
    } else {
        alignas(64) uint16_t codes[kChunk] = {};
        for (size_t j = 0; j < n; ++j) codes[j] = static_cast<uint16_t>(indices[j] & mask);
        pack_codes(bits, codes, n, out);
    }
}

// indices[j] = (indices[j] - first - j) << bits | the j-th of the codes.
THINWIRE_CLONES void join_low(const uint8_t* in, size_t n, int bits, int32_t first, int32_t* indices) {
    if (bits <= 8) {
        alignas(64) uint8_t codes[kChunk];
        unpack_codes(bits, in, n, codes);
        for (size_t j = 0; j < n; ++j) indices[j] = (indices[j] - first - static_cast<int32_t>(j)) << bits | codes[j];
    } else {
        alignas(64) uint16_t codes[kChunk];
        unpack_codes(bits, in, n, codes);
        for (size_t j = 0; j < n; ++j) indices[j] = (indices[j] - first - static_cast<int32_t>(j)) << bits | codes[j];
    }
}

// Words of the stream `in`, moved by 0 to 7 bits: up, behind the bits of `before`, or down, ahead of what follows.
THINWIRE_CLONES void move_up(const uint8_t* in, size_t num_words, int shift, uint8_t* out) {
    for (size_t w = 0; w < num_words; ++w) {
        const uint64_t before = load<uint64_t>(in + 8 * w), word = load<uint64_t>(in + 8 * w + 8);
        store(out + 8 * w, word << shift | before >> 1 >> (63 - shift));
    }
}

THINWIRE_CLONES void move_down(const uint8_t* in, size_t num_words, int shift, uint8_t* out) {
    for (size_t w = 0; w < num_words; ++w) {
        const uint64_t word = load<uint64_t>(in + 8 * w), after = load<uint64_t>(in + 8 * w + 8);
        store(out + 8 * w, word >> shift | after << 1 << (63 - shift));
    }
}

// The low bits of all indices, from bit `start` on; keeps the bits before it in its byte.
void write_low(const int32_t* indices, size_t count, int bits, uint64_t start, uint8_t* out) {
    out += start / 8;
    const int shift = static_cast<int>(start % 8);
    alignas(64) uint8_t packed[8 + kPackedNbytes + 8], moved[kPackedNbytes + 8];
    // What comes before the first word: the bits that are kept, highest.
    store(packed, shift ? uint64_t{*out} << (64 - shift) : 0);
    for (size_t at = 0; at < count; at += kChunk, out += kChunk / 8 * static_cast<size_t>(bits)) {
        const size_t n = std::min(kChunk, count - at), nbytes = (n * static_cast<size_t>(bits) + 7) / 8;
        pack_low(indices + at, n, bits, packed + 8);
        store(packed + 8 + nbytes, uint64_t{0});
        move_up(packed, nbytes / 8 + 1, shift, moved);
        std::memcpy(out, moved, (n * static_cast<size_t>(bits) + static_cast<size_t>(shift) + 7) / 8);
        store(packed, load<uint64_t>(packed + nbytes));
    }
}

void read_low(const uint8_t* in, size_t count, int bits, uint64_t start, int32_t* indices) {
    in += start / 8;
    const int shift = static_cast<int>(start % 8);
    alignas(64) uint8_t packed[kPackedNbytes + 16] = {}, moved[kPackedNbytes + 8];
    for (size_t at = 0; at < count; at += kChunk, in += kChunk / 8 * static_cast<size_t>(bits)) {
        const size_t n = std::min(kChunk, count - at), num_bits = n * static_cast<size_t>(bits);
        std::memcpy(packed, in, (num_bits + static_cast<size_t>(shift) + 7) / 8);
        move_down(packed, num_bits / 64 + 1, shift, moved);
        join_low(moved, n, bits, static_cast<int32_t>(at), indices + at);
    }
}

// Whether indices ascend strictly inside the segment; there may be none.
THINWIRE_CLONES bool ascending_below(const int32_t* indices, size_t count, int64_t numel) {
    uint32_t falls = 0;
    for (size_t j = 1; j < count; ++j) falls += indices[j] <= indices[j - 1];
    return count == 0 || (falls == 0 && indices[0] >= 0 && indices[count - 1] < numel);
}

}  // namespace

void encode_indices(const int32_t* indices, size_t count, const IndexCode& code, uint8_t* out) {
    if (code.num_bits == 0) return;
    std::memset(out, 0, code.nbytes());
    write_marks(indices, count, code, out);
    const int low = code.bitmap ? 0 : code.low_bits;
    if (low == 0) return;
    if (low <= kMaxLowBits) return write_low(indices, count, low, code.mark_bits, out);
    BitWriter writer(out, code.mark_bits);
    const uint32_t mask = (uint32_t{1} << low) - 1;
    for (size_t j = 0; j < count; ++j) writer.put(static_cast<uint32_t>(indices[j]) & mask, low);
    writer.finish();
}

bool decode_indices(const uint8_t* in, const IndexCode& code, uint64_t numel, int32_t* indices, size_t count) {
    if (code.num_bits == 0) {
        for (size_t j = 0; j < count; ++j) indices[j] = static_cast<int32_t>(j);
        return true;
    }
    if (code.num_bits % 8 && in[code.nbytes() - 1] >> (code.num_bits % 8)) return false;  // padding
    if (positions_of_bits(in, code.mark_bits, indices, count) != count) return false;
    if (code.bitmap) return true;
    if (code.low_bits > 0 && code.low_bits <= kMaxLowBits) {
        read_low(in, count, code.low_bits, code.mark_bits, indices);
    } else {
        BitReader reader(in, code.mark_bits, in + code.nbytes());
        for (size_t j = 0; j < count; ++j)
            indices[j] = static_cast<int32_t>((indices[j] - j) << code.low_bits | reader.get(code.low_bits));
    }
    return ascending_below(indices, count, static_cast<int64_t>(numel));
}

void check_ascending(const int32_t* indices, size_t count, int64_t numel) {
    require(ascending_below(indices, count, numel),
            "indices: expected strictly ascending indices inside their segment; sort them first");
}

std::vector<IndexCode> checked_codes(const Counts& counts, const Counts& numels, size_t num_indices) {
    require(counts.size() == numels.size(), "counts: expected one per segment");
    std::vector<IndexCode> codes;
    size_t total = 0;
    for (size_t s = 0; s < counts.size(); ++s) {
        require(numels[s] >= 0 && numels[s] <= INT32_MAX, "numels: expected 0 to 2^31 - 1");
        require(counts[s] >= 0 && counts[s] <= numels[s], "counts: expected 0 to the segment's elements");
        codes.push_back(choose(static_cast<uint64_t>(counts[s]), static_cast<uint64_t>(numels[s])));
        total += static_cast<size_t>(counts[s]);
    }
    require(total == num_indices, "indices: expected the sum of counts");
    return codes;
}

namespace {

void check_nbytes(const std::vector<IndexCode>& codes, size_t nbytes) {
    for (const IndexCode& code : codes) {
        require(code.nbytes() <= nbytes, "payload: its size does not fit the counts");
        nbytes -= code.nbytes();
    }
    require(nbytes == 0, "payload: its size does not fit the counts");
}

}  // namespace

void indices_encode(Indices indices, const Counts& counts, const Counts& numels, Bytes out) {
    const std::vector<IndexCode> codes = checked_codes(counts, numels, indices.numel);
    check_nbytes(codes, out.numel);
    const int32_t* from = indices.data;
    uint8_t* to = out.data;
    for (size_t s = 0; s < codes.size(); ++s) {
        const size_t count = static_cast<size_t>(counts[s]);
        check_ascending(from, count, numels[s]);
        encode_indices(from, count, codes[s], to);
        from += count;
        to += codes[s].nbytes();
    }
}

void indices_decode(Payload payload, const Counts& counts, const Counts& numels, IndicesOut indices) {
    const std::vector<IndexCode> codes = checked_codes(counts, numels, indices.numel);
    check_nbytes(codes, payload.numel);
    const uint8_t* from = payload.data;
    int32_t* to = indices.data;
    for (size_t s = 0; s < codes.size(); ++s) {
        const size_t count = static_cast<size_t>(counts[s]);
        require(decode_indices(from, codes[s], static_cast<uint64_t>(numels[s]), to, count),
                "payload: does not hold ascending indices inside their segment; it is corrupt");
        from += codes[s].nbytes();
        to += count;
    }
}

}  // namespace thinwire
