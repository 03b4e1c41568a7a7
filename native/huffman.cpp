// Canonical Huffman codes of at most 12 bits for bit-packed symbols. Byte layout: docs/wire.md.
#include <algorithm>
#include <array>

#include "kernels.hpp"
#include "pack.hpp"

namespace thinwire {

namespace {

constexpr int kMaxLength = 12;
constexpr uint8_t kRaw = 0, kCoded = 1;

using Lengths = std::array<uint8_t, 256>;

struct Code {
    uint16_t bits;  // the first bit is the lowest
    uint8_t length;
};

struct Node {
    uint64_t count;
    int parent;
};

// Huffman's tree by two queues: leaves in order of (count, symbol), and joined nodes, which are created in order of count. A
// leaf comes before a joined node of the same count. Returns the length of the longest code.
int build_lengths(const std::array<uint64_t, 256>& counts, Lengths& lengths) {
    std::vector<int> symbols;
    for (int s = 0; s < 256; ++s)
        if (counts[s]) symbols.push_back(s);
    lengths.fill(0);
    std::stable_sort(symbols.begin(), symbols.end(), [&](int a, int b) { return counts[a] < counts[b]; });
    const size_t num_leaves = symbols.size();
    std::vector<Node> nodes;
    for (int s : symbols) nodes.push_back({counts[s], -1});
    size_t leaf = 0, joined = num_leaves;
    auto take = [&] {
        const bool take_leaf = leaf < num_leaves && (joined >= nodes.size() || nodes[leaf].count <= nodes[joined].count);
        return take_leaf ? leaf++ : joined++;
    };
    for (size_t i = 1; i < num_leaves; ++i) {
        const size_t a = take(), b = take();
        nodes[a].parent = nodes[b].parent = static_cast<int>(nodes.size());
        nodes.push_back({nodes[a].count + nodes[b].count, -1});
    }
    int longest = num_leaves == 1;
    if (num_leaves == 1) lengths[symbols[0]] = 1;
    std::vector<int> depth(nodes.size(), 0);
    for (size_t i = nodes.size(); i-- > 0;) {
        if (nodes[i].parent >= 0) depth[i] = depth[nodes[i].parent] + 1;
        if (i < num_leaves && num_leaves > 1) {
            longest = std::max(longest, depth[i]);
            lengths[symbols[i]] = static_cast<uint8_t>(std::min(depth[i], 255));
        }
    }
    return longest;
}

// Halves the counts until no code exceeds the limit.
Lengths limited_lengths(std::array<uint64_t, 256> counts) {
    Lengths lengths;
    while (build_lengths(counts, lengths) > kMaxLength)
        for (uint64_t& count : counts) count = (count + 1) / 2;
    return lengths;
}

// Assigns codes in order of (length, symbol), each one more than the last. False if no prefix code has these lengths.
bool assign_codes(const Lengths& lengths, std::array<Code, 256>& codes) {
    uint32_t next = 0;
    for (int length = 1; length <= kMaxLength; ++length, next <<= 1)
        for (int s = 0; s < 256; ++s) {
            if (lengths[s] != length) continue;
            if (next >= 1u << length) return false;
            uint32_t reversed = 0;
            for (int i = 0; i < length; ++i) reversed |= (next >> i & 1) << (length - 1 - i);
            codes[s] = {static_cast<uint16_t>(reversed), static_cast<uint8_t>(length)};
            ++next;
        }
    return true;
}

size_t packed_nbytes(int64_t count, int bits) { return (static_cast<size_t>(count) * bits + 7) / 8; }

// Two lengths per byte.
size_t table_nbytes(int bits) { return ((size_t{1} << bits) + 1) / 2; }

// Calls `act(symbols, n)` for chunks of the symbols of all segments, in order.
template <typename Act>
void for_each_chunk(const uint8_t* packed, const std::vector<int64_t>& counts, int bits, Act act) {
    alignas(64) uint8_t symbols[kChunk];
    for (const int64_t count : counts) {
        const size_t n = static_cast<size_t>(count);
        for (size_t start = 0; start < n; start += kChunk) {
            const size_t stop = std::min(kChunk, n - start);
            unpack_codes(bits, packed + start / 8 * bits, stop, symbols);
            act(symbols, stop);
        }
        packed += packed_nbytes(count, bits);
    }
}

size_t checked_nbytes(const std::vector<int64_t>& counts, int bits) {
    require(bits >= 1 && bits <= 8, "bits: expected 1 to 8");
    size_t total = 0;
    for (const int64_t count : counts) {
        require(count >= 0, "counts: expected none below zero");
        total += packed_nbytes(count, bits);
    }
    return total;
}

struct BitWriter {
    uint8_t* to;
    uint64_t buffer = 0;
    int used = 0;

    // At most 56 bits between flushes.
    THINWIRE_INLINE void put(Code code) {
        buffer |= static_cast<uint64_t>(code.bits) << used;
        used += code.length;
    }
    // Writes eight bytes and keeps the complete ones.
    THINWIRE_INLINE void flush() {
        store(to, buffer);
        to += used / 8;
        buffer >>= used / 8 * 8;
        used %= 8;
    }
};

struct BitReader {
    const uint8_t *from, *end;
    uint64_t buffer = 0;
    int held = 0;
    uint64_t num_read = 0;

    THINWIRE_INLINE void refill() {
        if (end - from >= 8) {
            buffer |= load<uint64_t>(from) << held;
            from += (63 - held) / 8;
            held |= 56;
        } else {
            for (; held <= 56 && from < end; held += 8) buffer |= static_cast<uint64_t>(*from++) << held;
            held = std::max(held, 57);  // zeros after the end; num_read detects that they were read
        }
    }
    THINWIRE_INLINE uint8_t take(const Code* table) {
        const Code code = table[buffer & ((1 << kMaxLength) - 1)];
        buffer >>= code.length;
        held -= code.length;
        num_read += code.length;
        return static_cast<uint8_t>(code.bits);
    }
};

// Entry i has the symbol, in `bits`, whose code is a prefix of i; its length is 0 if there is none.
std::vector<Code> decoding_table(const Lengths& lengths) {
    std::array<Code, 256> codes{};
    require(assign_codes(lengths, codes), "payload: its code lengths are no code; it is corrupt");
    std::vector<Code> table(1 << kMaxLength, Code{0, 0});
    for (int s = 0; s < 256; ++s)
        if (lengths[s])
            for (size_t i = codes[s].bits; i < table.size(); i += size_t{1} << lengths[s])
                table[i] = {static_cast<uint16_t>(s), lengths[s]};
    return table;
}

}  // namespace

size_t huffman_encode(Payload symbols_in, const Counts& counts, int bits, Bytes payload) {
    const uint8_t* packed = symbols_in.data;
    const size_t nbytes = symbols_in.numel, out_nbytes = payload.numel;
    uint8_t* out = payload.data;
    require(nbytes == checked_nbytes(counts, bits), "packed: its size does not fit the counts");
    require(out_nbytes >= nbytes + 1 + 8, "out: expected eight bytes more than the bound");
    std::array<std::array<uint64_t, 256>, 4> tally{};  // four tables, so that equal neighbours do not wait for each other
    std::array<uint64_t, 256> frequency{};
    for_each_chunk(packed, counts, bits, [&](const uint8_t* symbols, size_t n) {
        for (size_t i = 0; i < n; ++i) ++tally[i % 4][symbols[i]];
    });
    for (const auto& part : tally)
        for (int s = 0; s < 256; ++s) frequency[s] += part[s];
    const Lengths lengths = limited_lengths(frequency);
    std::array<Code, 256> codes{};
    assign_codes(lengths, codes);
    uint64_t num_bits = 0;
    for (int s = 0; s < 256; ++s) num_bits += frequency[s] * lengths[s];
    const size_t size = 1 + table_nbytes(bits) + (num_bits + 7) / 8;
    if (size > nbytes) {
        out[0] = kRaw;
        std::memcpy(out + 1, packed, nbytes);
        return nbytes + 1;
    }
    out[0] = kCoded;
    for (size_t i = 0; i < table_nbytes(bits); ++i)
        out[1 + i] = static_cast<uint8_t>(lengths[2 * i] | lengths[2 * i + 1] << 4);
    BitWriter writer{out + 1 + table_nbytes(bits)};
    for_each_chunk(packed, counts, bits, [&](const uint8_t* symbols, size_t n) {
        size_t i = 0;
        for (; i + 4 <= n; i += 4) {
            for (size_t j = 0; j < 4; ++j) writer.put(codes[symbols[i + j]]);
            writer.flush();
        }
        for (; i < n; ++i) writer.put(codes[symbols[i]]), writer.flush();
    });
    return size;
}

void huffman_decode(Payload coded, const Counts& counts, int bits, Bytes packed) {
    const uint8_t* payload = coded.data;
    const size_t nbytes = coded.numel, out_nbytes = packed.numel;
    uint8_t* out = packed.data;
    require(out_nbytes == checked_nbytes(counts, bits), "out: its size does not fit the counts");
    require(nbytes >= 1 && payload[0] <= kCoded, "payload: its first byte is neither 0 nor 1; it is corrupt");
    if (payload[0] == kRaw) {
        require(nbytes == out_nbytes + 1, "payload: its size does not fit the counts; it is corrupt");
        std::memcpy(out, payload + 1, out_nbytes);
        return;
    }
    require(nbytes >= 1 + table_nbytes(bits), "payload: it ends before its code lengths; it is corrupt");
    Lengths lengths{};
    for (size_t i = 0; i < table_nbytes(bits); ++i) {
        lengths[2 * i] = payload[1 + i] & 15;
        lengths[2 * i + 1] = payload[1 + i] >> 4;
    }
    for (const uint8_t length : lengths) require(length <= kMaxLength, "payload: a code is too long; it is corrupt");
    const std::vector<Code> table = decoding_table(lengths);
    const uint8_t* end = payload + nbytes;
    BitReader reader{payload + 1 + table_nbytes(bits), end};
    const uint64_t num_bits = 8 * static_cast<uint64_t>(end - reader.from);
    uint8_t shortest = kMaxLength;
    alignas(64) uint8_t symbols[kChunk];
    for (const int64_t count : counts) {
        const size_t n = static_cast<size_t>(count);
        for (size_t start = 0; start < n; start += kChunk) {
            const size_t stop = std::min(kChunk, n - start);
            for (size_t i = 0; i < stop; i += 4) {
                reader.refill();
                for (size_t j = i; j < std::min(i + 4, stop); ++j) {
                    shortest = std::min(shortest, table[reader.buffer & ((1 << kMaxLength) - 1)].length);
                    symbols[j] = reader.take(table.data());
                }
            }
            require(shortest > 0, "payload: it holds bits that are no code; it is corrupt");
            for (size_t i = stop; i % 8; ++i) symbols[i] = 0;
            pack_codes(bits, symbols, stop, out + start / 8 * bits);
        }
        out += packed_nbytes(count, bits);
    }
    require(reader.num_read <= num_bits && num_bits - reader.num_read < 8 && reader.buffer == 0,
            "payload: its size does not fit the counts; it is corrupt");
}

}  // namespace thinwire
