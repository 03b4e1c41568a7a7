// Ascending indices, coded per segment by the smaller of Elias-Fano and a bitmap. A segment's code is one bit stream,
// padded with zeros to whole bytes. Elias-Fano: bit (index >> l) + j is set for the j-th index, then come the low l
// bits of each. Where none or all are kept there is nothing to code.
//
// The code above has a size that is known beforehand. `pack_smallest` also tries packed gaps, whose size depends on the
// indices: per segment a byte that names the code, and the code. A plain 32 bits an index is never smaller.
#include "bitstream.hpp"
#include "compact.hpp"
#include "kernels.hpp"

namespace thinwire {

namespace {

struct Code {
    bool bitmap;
    int low_bits;        // of Elias-Fano
    uint64_t mark_bits;  // the bitmap, or the high parts in unary
    uint64_t num_bits;
    size_t nbytes() const { return (num_bits + 7) / 8; }
};

Code choose(uint64_t count, uint64_t numel) {
    if (count == 0 || count == numel) return {true, 0, 0, 0};
    Code best{true, 0, numel, numel};
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

// Sets one bit for each index, in memory that is zero: bit `index`, or (index >> low) + j for Elias-Fano.
void write_marks(const int32_t* indices, size_t count, const Code& code, uint8_t* out) {
    uint64_t word = 0, at = 0;  // bits of bytes 8 at to 8 at + 7
    const auto put = [&] { std::memcpy(out + 8 * at, &word, std::min<uint64_t>(8, code.nbytes() - 8 * at)); };
    for (size_t j = 0; j < count; ++j) {
        const uint64_t index = static_cast<uint64_t>(indices[j]);
        const uint64_t bit = code.bitmap ? index : (index >> code.low_bits) + j;
        if (bit / 64 != at) {
            put();
            word = 0;
            at = bit / 64;
        }
        word |= uint64_t{1} << (bit % 64);
    }
    put();
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

void pack_segment(const int32_t* indices, size_t count, const Code& code, uint8_t* out) {
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

// Whether indices ascend strictly inside the segment; there may be none.
THINWIRE_CLONES bool ascending_below(const int32_t* indices, size_t count, int64_t numel) {
    uint32_t falls = 0;
    for (size_t j = 1; j < count; ++j) falls += indices[j] <= indices[j - 1];
    return count == 0 || (falls == 0 && indices[0] >= 0 && indices[count - 1] < numel);
}

bool unpack_segment(const uint8_t* in, const Code& code, uint64_t numel, int32_t* indices, size_t count) {
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

// Gaps between indices, less one, in blocks of 128: a byte with the bits of the largest, then that many bits for each.
constexpr size_t kGaps = 128;

uint32_t gap_at(const int32_t* indices, size_t j) {
    return static_cast<uint32_t>(j == 0 ? indices[0] : indices[j] - indices[j - 1] - 1);
}

int bits_of(uint32_t value) {
    int bits = 0;
    while (value >> bits) ++bits;
    return bits;
}

size_t gaps_nbytes(size_t count, int width) { return (count * static_cast<size_t>(width) + 7) / 8; }

void pack_gaps(const int32_t* indices, size_t count, std::vector<uint8_t>& out) {
    for (size_t at = 0; at < count; at += kGaps) {
        const size_t end = std::min(count, at + kGaps);
        uint32_t any = 0;  // has the bits of the largest
        for (size_t j = at; j < end; ++j) any |= gap_at(indices, j);
        const int width = bits_of(any);
        out.push_back(static_cast<uint8_t>(width));
        const size_t start = out.size();
        out.resize(start + gaps_nbytes(end - at, width));
        BitWriter writer(out.data() + start, 0);
        for (size_t j = at; j < end; ++j) writer.put(gap_at(indices, j), width);
        writer.finish();
    }
}

// Bytes that were read, or none if they are no such code.
size_t unpack_gaps(const uint8_t* in, size_t nbytes, size_t numel, int32_t* indices, size_t count) {
    size_t read = 0;
    int64_t before = -1;
    for (size_t at = 0; at < count; at += kGaps) {
        const size_t size = std::min(kGaps, count - at);
        if (read == nbytes || in[read] > 31) return 0;
        const int width = in[read++];
        const size_t num_bits = size * static_cast<size_t>(width), end = read + gaps_nbytes(size, width);
        if (end > nbytes || (num_bits % 8 && in[end - 1] >> (num_bits % 8))) return 0;
        BitReader reader(in + read, 0, in + end);
        for (size_t j = at; j < at + size; ++j) {
            before += 1 + static_cast<int64_t>(reader.get(width));
            if (before >= static_cast<int64_t>(numel)) return 0;
            indices[j] = static_cast<int32_t>(before);
        }
        read = end;
    }
    return read;
}

// The width of the low parts that bounds the Rice code best, in bits: count (l + 1) + floor((numel - count) / 2^l).
// Gaps less one add up to numel - count at most, so that no indices take more.
struct Rice {
    int low_bits = 0;
    uint64_t max_bits = 0;
};

Rice choose_rice(uint64_t count, uint64_t numel) {
    Rice best;
    if (count == 0 || count == numel) return best;
    best.max_bits = numel;  // of no low bits
    for (int low = 1; low < 31; ++low) {
        const uint64_t bits = count * static_cast<uint64_t>(low + 1) + ((numel - count) >> low);
        if (bits < best.max_bits) best = {low, bits};
    }
    return best;
}

void pack_rice_segment(const int32_t* indices, size_t count, int low, std::vector<uint8_t>& out) {
    uint64_t marks = count;
    for (size_t j = 0; j < count; ++j) marks += gap_at(indices, j) >> low;
    const size_t start = out.size();
    out.resize(start + (marks + count * static_cast<uint64_t>(low) + 7) / 8);  // zeros
    uint8_t* code = out.data() + start;
    uint64_t at = 0;
    for (size_t j = 0; j < count; ++j) {
        at += gap_at(indices, j) >> low;
        code[(at + j) / 8] |= static_cast<uint8_t>(1u << ((at + j) % 8));
    }
    if (low == 0) return;
    BitWriter writer(code, marks);
    const uint32_t mask = (uint32_t{1} << low) - 1;
    for (size_t j = 0; j < count; ++j) writer.put(gap_at(indices, j) & mask, low);
    writer.finish();
}

// Positions of the first `count` set bits; false if there are fewer among `num_bits`.
bool first_marks(const uint8_t* in, uint64_t num_bits, int32_t* positions, size_t count) {
    size_t found = 0;
    for (uint64_t byte = 0; byte * 8 < num_bits && found < count; ++byte) {
        for (uint32_t bits = in[byte]; bits && found < count; bits &= bits - 1) {
            positions[found++] = static_cast<int32_t>(byte * 8 + static_cast<uint64_t>(lowest_bit(bits)));
        }
    }
    return found == count;
}

// Bytes that were read, or none if they are no such code.
size_t unpack_rice_segment(const uint8_t* in, size_t nbytes, const Rice& code, size_t numel, int32_t* indices,
                           size_t count) {
    const uint64_t most = std::min<uint64_t>(uint64_t{nbytes} * 8, (code.max_bits + 7) / 8 * 8);
    if (!first_marks(in, most, indices, count)) return 0;
    const uint64_t marks = static_cast<uint64_t>(indices[count - 1]) + 1;
    const uint64_t num_bits = marks + count * static_cast<uint64_t>(code.low_bits);
    const size_t end = (num_bits + 7) / 8;
    if (end > nbytes || (num_bits % 8 && in[end - 1] >> (num_bits % 8))) return 0;
    BitReader reader(in, marks, in + end);
    int64_t mark_before = -1, before = -1;
    for (size_t j = 0; j < count; ++j) {
        const int64_t mark = indices[j], quotient = mark - mark_before - 1;
        const int64_t low = code.low_bits ? reader.get(code.low_bits) : 0;
        before += 1 + ((quotient << code.low_bits) | low);
        if (before >= static_cast<int64_t>(numel)) return 0;
        indices[j] = static_cast<int32_t>(before);
        mark_before = mark;
    }
    return end;
}

constexpr uint8_t kBySize = 0, kByGaps = 1;

std::vector<Code> checked_codes(const std::vector<int64_t>& counts, const std::vector<int64_t>& numels, size_t numel) {
    require(counts.size() == numels.size(), "counts: expected one per segment");
    std::vector<Code> codes;
    size_t total = 0;
    for (size_t s = 0; s < counts.size(); ++s) {
        require(numels[s] >= 0 && numels[s] <= INT32_MAX, "numels: expected 0 to 2^31 - 1");
        require(counts[s] >= 0 && counts[s] <= numels[s], "counts: expected 0 to the segment's elements");
        codes.push_back(choose(static_cast<uint64_t>(counts[s]), static_cast<uint64_t>(numels[s])));
        total += static_cast<size_t>(counts[s]);
    }
    require(total == numel, "indices: expected the sum of counts");
    return codes;
}

std::vector<Code> checked_codes(const std::vector<int64_t>& counts, const std::vector<int64_t>& numels, size_t numel,
                                size_t nbytes) {
    std::vector<Code> codes = checked_codes(counts, numels, numel);
    for (const Code& code : codes) {
        require(code.nbytes() <= nbytes, "payload: its size does not fit the counts");
        nbytes -= code.nbytes();
    }
    require(nbytes == 0, "payload: its size does not fit the counts");
    return codes;
}

}  // namespace

void pack_indices(const int32_t* indices, size_t numel, const std::vector<int64_t>& counts,
                  const std::vector<int64_t>& numels, uint8_t* out, size_t out_nbytes) {
    const std::vector<Code> codes = checked_codes(counts, numels, numel, out_nbytes);
    for (size_t s = 0; s < codes.size(); ++s) {
        const size_t count = static_cast<size_t>(counts[s]);
        require(ascending_below(indices, count, numels[s]),
                "indices: expected strictly ascending indices inside their segment; sort them first");
        pack_segment(indices, count, codes[s], out);
        indices += count;
        out += codes[s].nbytes();
    }
}

void unpack_indices(const uint8_t* payload, size_t nbytes, const std::vector<int64_t>& counts,
                    const std::vector<int64_t>& numels, int32_t* indices, size_t numel) {
    const std::vector<Code> codes = checked_codes(counts, numels, numel, nbytes);
    for (size_t s = 0; s < codes.size(); ++s) {
        const size_t count = static_cast<size_t>(counts[s]);
        require(unpack_segment(payload, codes[s], static_cast<uint64_t>(numels[s]), indices, count),
                "payload: does not hold ascending indices inside their segment; it is corrupt");
        indices += count;
        payload += codes[s].nbytes();
    }
}

std::vector<uint8_t> pack_smallest(const int32_t* indices, size_t numel, const std::vector<int64_t>& counts,
                                   const std::vector<int64_t>& numels) {
    std::vector<uint8_t> out, gaps;
    const std::vector<Code> codes = checked_codes(counts, numels, numel);
    for (size_t s = 0; s < codes.size(); ++s) {
        const size_t count = static_cast<size_t>(counts[s]), at = out.size(), nbytes = codes[s].nbytes();
        require(ascending_below(indices, count, numels[s]),
                "indices: expected strictly ascending indices inside their segment; sort them first");
        gaps.clear();
        if (nbytes > 0) pack_gaps(indices, count, gaps);
        if (gaps.size() < nbytes) {
            out.push_back(kByGaps);
            out.insert(out.end(), gaps.begin(), gaps.end());
        } else {
            out.resize(at + 1 + nbytes);
            out[at] = kBySize;
            pack_segment(indices, count, codes[s], out.data() + at + 1);
        }
        indices += count;
    }
    return out;
}

void unpack_smallest(const uint8_t* payload, size_t nbytes, const std::vector<int64_t>& counts,
                     const std::vector<int64_t>& numels, int32_t* indices, size_t numel) {
    const std::vector<Code> codes = checked_codes(counts, numels, numel);
    for (size_t s = 0; s < codes.size(); ++s) {
        const size_t count = static_cast<size_t>(counts[s]);
        require(nbytes > 0 && payload[0] <= kByGaps, "payload: expected the byte that names how indices are coded");
        size_t read = codes[s].nbytes();
        bool ok;
        if (payload[0] == kByGaps) {
            read = unpack_gaps(payload + 1, nbytes - 1, static_cast<size_t>(numels[s]), indices, count);
            ok = read > 0;
        } else {
            ok = read < nbytes && unpack_segment(payload + 1, codes[s], static_cast<uint64_t>(numels[s]), indices, count);
        }
        require(ok, "payload: its indices are corrupt");
        indices += count;
        payload += 1 + read;
        nbytes -= 1 + read;
    }
    require(nbytes == 0, "payload: bytes are left after the indices");
}

std::vector<uint8_t> pack_rice(const int32_t* indices, size_t numel, const std::vector<int64_t>& counts,
                               const std::vector<int64_t>& numels) {
    checked_codes(counts, numels, numel);
    std::vector<uint8_t> out;
    for (size_t s = 0; s < counts.size(); ++s) {
        const size_t count = static_cast<size_t>(counts[s]);
        require(ascending_below(indices, count, numels[s]),
                "indices: expected strictly ascending indices inside their segment; sort them first");
        const Rice code = choose_rice(count, static_cast<uint64_t>(numels[s]));
        if (code.max_bits > 0) pack_rice_segment(indices, count, code.low_bits, out);
        indices += count;
    }
    return out;
}

void unpack_rice(const uint8_t* payload, size_t nbytes, const std::vector<int64_t>& counts,
                 const std::vector<int64_t>& numels, int32_t* indices, size_t numel) {
    checked_codes(counts, numels, numel);
    for (size_t s = 0; s < counts.size(); ++s) {
        const size_t count = static_cast<size_t>(counts[s]), size = static_cast<size_t>(numels[s]);
        const Rice code = choose_rice(count, size);
        if (code.max_bits == 0) {
            for (size_t j = 0; j < count; ++j) indices[j] = static_cast<int32_t>(j);
        } else {
            const size_t read = unpack_rice_segment(payload, nbytes, code, size, indices, count);
            require(read > 0, "payload: its indices are corrupt");
            payload += read;
            nbytes -= read;
        }
        indices += count;
    }
    require(nbytes == 0, "payload: bytes are left after the indices");
}

void pack_words(const int32_t* words, size_t count, int bits, uint8_t* out, size_t out_nbytes) {
    require(bits >= 0 && bits < 32 && out_nbytes == gaps_nbytes(count, bits), "out: its size does not fit the words");
    BitWriter writer(out, 0);
    const uint32_t mask = (uint32_t{1} << bits) - 1;
    for (size_t j = 0; j < count; ++j) writer.put(static_cast<uint32_t>(words[j]) & mask, bits);
    writer.finish();
}

void unpack_words(const uint8_t* payload, size_t nbytes, int bits, int32_t* words, size_t count) {
    require(bits >= 0 && bits < 32 && nbytes == gaps_nbytes(count, bits), "payload: its size does not fit the words");
    BitReader reader(payload, 0, payload + nbytes);
    for (size_t j = 0; j < count; ++j) words[j] = static_cast<int32_t>(reader.get(bits));
}

}  // namespace thinwire
