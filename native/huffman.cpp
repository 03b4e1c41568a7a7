// Huffman codes for bit-packed symbols. Byte layout: docs/wire.md.
//
// Tables handle several symbols at once. The encoder looks up all symbols of a packed byte, where a byte holds whole symbols.
// The decoder looks up all symbols whose codes are complete in the next 12 bits, and appends them to the packed output.
#include "huffman.hpp"

#include "pack.hpp"

#if !defined(THINWIRE_TABLED)  // the sanitizers' programs make tables for fewer symbols
#define THINWIRE_TABLED (1 << 14)
#endif

namespace thinwire {

namespace {

constexpr uint8_t kRaw = 0, kCoded = 1;

size_t packed_nbytes(int64_t count, int bits) { return (static_cast<size_t>(count) * bits + 7) / 8; }

// Two lengths per byte.
size_t table_nbytes(int bits) { return ((size_t{1} << bits) + 1) / 2; }

size_t checked_nbytes(const Counts& counts, int bits) {
    require(bits >= 1 && bits <= 8, "bits: expected 1 to 8");
    size_t total = 0;
    for (const int64_t count : counts) {
        require(count >= 0, "counts: expected none below zero");
        total += packed_nbytes(count, bits);
    }
    return total;
}

// ---- encoding ----

// Calls `act(bytes, n)` for bytes that hold `per_byte` whole symbols each, and `act_one(symbol)` for each symbol of the last
// byte of a segment if that is not full. Where 8 is no multiple of `bits`, symbols are unpacked first.
template <typename Act, typename ActOne>
void for_each_byte(const uint8_t* packed, const Counts& counts, int bits, Act act, ActOne act_one) {
    alignas(64) uint8_t symbols[kChunk];
    const int per_byte = 8 % bits == 0 ? 8 / bits : 1;
    for (const int64_t count : counts) {
        const size_t n = static_cast<size_t>(count);
        if (8 % bits == 0) {
            act(packed, n / per_byte);
            for (size_t i = 0; i < n % per_byte; ++i)
                act_one(static_cast<uint8_t>(packed[n / per_byte] >> i * bits & ((1 << bits) - 1)));
        } else {
            for (size_t start = 0; start < n; start += kChunk) {
                const size_t size = std::min(kChunk, n - start);
                unpack_codes(bits, packed + start / 8 * bits, size, symbols);
                act(symbols, size);
            }
        }
        packed += packed_nbytes(count, bits);
    }
}

// Adds the frequencies of the symbols in a byte that occurs `count` times.
void add_byte(std::array<uint64_t, 256>& frequency, int byte, int bits, uint64_t count) {
    if (8 % bits != 0) bits = 8;
    for (int at = 0; at < 8; at += bits) frequency[byte >> at & ((1 << bits) - 1)] += count;
}

std::array<uint64_t, 256> frequencies(const uint8_t* packed, const Counts& counts, int bits) {
    std::array<std::array<uint64_t, 256>, 4> tally{};  // four tables, so that equal neighbours do not wait for each other
    std::array<uint64_t, 256> frequency{};
    for_each_byte(
        packed, counts, bits,
        [&](const uint8_t* bytes, size_t n) {
            size_t i = 0;
            for (; i + 8 <= n; i += 8) {
                const uint64_t word = load<uint64_t>(bytes + i);
                for (int j = 0; j < 8; ++j) ++tally[j % 4][word >> 8 * j & 255];
            }
            for (; i < n; ++i) ++tally[0][bytes[i]];
        },
        [&](uint8_t symbol) { ++frequency[symbol]; });
    for (const auto& part : tally)
        for (int byte = 0; byte < 256; ++byte)
            if (part[byte]) add_byte(frequency, byte, bits, part[byte]);
    return frequency;
}

// The codes of all symbols in a byte, one after the other: at most 24 bits, because only 4 bits make long codes of two.
struct Word {
    uint64_t bits, length;
};

std::array<Word, 256> words_of_bytes(const std::array<Code, 256>& codes, int bits) {
    std::array<Word, 256> words{};
    if (8 % bits != 0) bits = 8;
    for (int byte = 0; byte < 256; ++byte)
        for (int at = 0; at < 8; at += bits) {
            const Code code = codes[byte >> at & ((1 << bits) - 1)];
            words[byte].bits |= static_cast<uint64_t>(code.bits) << words[byte].length;
            words[byte].length += code.length;
        }
    return words;
}

// Writes bits to memory. Bits of at most 56 may be put between flushes.
struct Writer {
    uint8_t* to;
    uint64_t buffer = 0, used = 0;

    THINWIRE_INLINE void put(uint64_t bits, uint64_t count) {
        buffer |= bits << used;
        used += count;
    }
    // Writes eight bytes and keeps the incomplete one.
    THINWIRE_INLINE void flush() {
        store(to, buffer);
        to += used / 8;
        buffer >>= used / 8 * 8;
        used %= 8;
    }
    void flush_whole_bytes() {
        for (; used >= 8; used -= 8, buffer >>= 8) *to++ = static_cast<uint8_t>(buffer);
    }
    void finish_segment() {
        flush_whole_bytes();
        if (used > 0) *to++ = static_cast<uint8_t>(buffer);
        buffer = used = 0;
    }
};

THINWIRE_CLONES void write_bytes(const uint8_t* bytes, size_t n, const Word* words, Writer* out) {
    Writer writer = *out;
    size_t i = 0;
    for (; i + 2 <= n; i += 2) {  // joined first, so that the next pair waits for one shift only
        const Word first = words[bytes[i]], second = words[bytes[i + 1]];
        writer.put(first.bits | second.bits << first.length, first.length + second.length);
        writer.flush();
    }
    if (i < n) writer.put(words[bytes[i]].bits, words[bytes[i]].length), writer.flush();
    *out = writer;
}

void write_symbols(const uint8_t* packed, const Counts& counts, int bits, const std::array<Code, 256>& codes,
                   uint8_t* out) {
    const std::array<Word, 256> words = words_of_bytes(codes, bits);
    Writer writer{out};
    for_each_byte(
        packed, counts, bits, [&](const uint8_t* bytes, size_t n) { write_bytes(bytes, n, words.data(), &writer); },
        [&](uint8_t symbol) { writer.put(codes[symbol].bits, codes[symbol].length), writer.flush(); });
}

// ---- decoding ----

struct SymbolReader {
    const uint8_t *from, *end;
    uint64_t buffer = 0;
    uint32_t held = 0;
    uint64_t num_read = 0;

    // Then 57 bits or more may be taken.
    THINWIRE_INLINE void refill() {
        if (end - from >= 8) {
            buffer |= load<uint64_t>(from) << held;
            from += (63 - held) / 8;
            held |= 56;
        } else {
            for (; held <= 56 && from < end; held += 8) buffer |= static_cast<uint64_t>(*from++) << held;
            held = std::max(held, 57u);  // zeros after the end; num_read detects that they were read
        }
    }
    THINWIRE_INLINE size_t next() const { return buffer & ((1 << kMaxLength) - 1); }
    THINWIRE_INLINE void skip(uint32_t length) {
        buffer >>= length;
        held -= length;
        num_read += length;
    }
};

// Symbols whose codes are complete in 12 bits, in one word: in 6 bits the length of these codes, in 5 bits the length of the
// packed symbols, then the packed symbols, and the highest bit if the 12 bits begin with no code.
constexpr int kSymbolBits = 20;
constexpr uint32_t kInvalid = 1u << 31;
constexpr size_t kMinTabled = THINWIRE_TABLED;  // symbols that are worth such a table
constexpr size_t kBatch = 4;            // lookups between refills
constexpr size_t kBatchBits = kBatch * kSymbolBits + 8 + 64;  // of packed output, so that a flush stays inside

std::vector<uint32_t> table_of_several(const std::vector<Code>& table, int bits) {
    std::vector<uint32_t> several(table.size());
    for (size_t i = 0; i < table.size(); ++i) {
        uint32_t symbols = 0;
        int length = 0, packed = 0;
        while (packed + bits <= kSymbolBits) {
            const Code code = table[i >> length];
            if (code.length == 0 || length + code.length > kMaxLength) break;
            symbols |= static_cast<uint32_t>(code.bits) << packed;
            packed += bits;
            length += code.length;
        }
        several[i] = symbols << 11 | static_cast<uint32_t>(packed) << 6 | static_cast<uint32_t>(length);
        if (length == 0) several[i] = kInvalid;
    }
    return several;
}

// Entry i has the symbol, in `bits`, whose code is a prefix of i; its length is 0 if there is none.
std::vector<Code> table_of_one(const Lengths& lengths) {
    std::array<Code, 256> codes{};
    require(assign_codes(lengths, codes), "payload: its code lengths are no code; it is corrupt");
    std::vector<Code> table(1 << kMaxLength, Code{0, 0});
    for (int s = 0; s < 256; ++s)
        if (lengths[s])
            for (size_t i = codes[s].bits; i < table.size(); i += size_t{1} << lengths[s])
                table[i] = {static_cast<uint16_t>(s), lengths[s]};
    return table;
}

constexpr size_t kNone = SIZE_MAX;
const char* const kNoCode = "payload: it holds bits that are no code; it is corrupt";

// Reads symbols several at a time, while more than a batch is left of `num_bits` packed bits. Returns how many bits are left,
// or kNone where bits are no code. It must not throw: compilers assume that a cloned function never throws.
THINWIRE_CLONES size_t read_several(const uint32_t* table, SymbolReader* in, Writer* out, size_t num_bits) {
    SymbolReader reader = *in;
    Writer writer = *out;
    uint32_t all = 0;
    while (num_bits >= kBatchBits && all < kInvalid) {
        reader.refill();
        uint32_t lengths = 0;  // both sums
        for (size_t i = 0; i < kBatch; ++i) {
            const uint32_t entry = table[reader.next()];
            reader.buffer >>= entry & 63;
            writer.put(entry >> 11, entry >> 6 & 31);
            lengths += entry & 2047;
            all |= entry;
            if (i % 2) writer.flush();
        }
        reader.held -= lengths & 63;
        reader.num_read += lengths & 63;
        num_bits -= lengths >> 6;
    }
    *in = reader, *out = writer;
    return all < kInvalid ? num_bits : kNone;
}

void read_each(const std::vector<Code>& table, SymbolReader& reader, Writer& writer, size_t num_bits, int bits) {
    for (; num_bits > 0; num_bits -= static_cast<size_t>(bits)) {
        reader.refill();
        const Code code = table[reader.next()];
        require(code.length > 0, kNoCode);
        reader.skip(code.length);
        writer.put(code.bits, static_cast<uint64_t>(bits));
        writer.flush_whole_bytes();
    }
    writer.finish_segment();
}

}  // namespace

size_t huffman_encode(Payload symbols, const Counts& counts, int bits, Bytes payload) {
    const size_t nbytes = symbols.numel;
    uint8_t* out = payload.data;
    require(nbytes == checked_nbytes(counts, bits), "packed: its size does not fit the counts");
    require(payload.numel >= nbytes + 1 + 8, "out: expected eight bytes more than the bound");
    const std::array<uint64_t, 256> frequency = frequencies(symbols.data, counts, bits);
    const Lengths lengths = limited_lengths(frequency);
    std::array<Code, 256> codes{};
    assign_codes(lengths, codes);
    uint64_t num_bits = 0;
    for (int s = 0; s < 256; ++s) num_bits += frequency[s] * lengths[s];
    const size_t size = 1 + table_nbytes(bits) + (num_bits + 7) / 8;
    if (size > nbytes) {
        out[0] = kRaw;
        std::memcpy(out + 1, symbols.data, nbytes);
        return nbytes + 1;
    }
    out[0] = kCoded;
    for (size_t i = 0; i < table_nbytes(bits); ++i)
        out[1 + i] = static_cast<uint8_t>(lengths[2 * i] | lengths[2 * i + 1] << 4);
    write_symbols(symbols.data, counts, bits, codes, out + 1 + table_nbytes(bits));
    return size;
}

void huffman_decode(Payload coded, const Counts& counts, int bits, Bytes packed) {
    const uint8_t* payload = coded.data;
    const size_t nbytes = coded.numel, total = packed.numel;
    require(total == checked_nbytes(counts, bits), "out: its size does not fit the counts");
    require(nbytes >= 1 && payload[0] <= kCoded, "payload: its first byte is neither 0 nor 1; it is corrupt");
    if (payload[0] == kRaw) {
        require(nbytes == total + 1, "payload: its size does not fit the counts; it is corrupt");
        std::memcpy(packed.data, payload + 1, total);
        return;
    }
    require(nbytes >= 1 + table_nbytes(bits), "payload: it ends before its code lengths; it is corrupt");
    Lengths lengths{};
    for (size_t i = 0; i < table_nbytes(bits); ++i) {
        lengths[2 * i] = payload[1 + i] & 15;
        lengths[2 * i + 1] = payload[1 + i] >> 4;
    }
    for (const uint8_t length : lengths) require(length <= kMaxLength, "payload: a code is too long; it is corrupt");
    const std::vector<Code> table = table_of_one(lengths);
    std::vector<uint32_t> several;
    if (8 * total / static_cast<size_t>(bits) >= kMinTabled) several = table_of_several(table, bits);
    const uint8_t* end = payload + nbytes;
    SymbolReader reader{payload + 1 + table_nbytes(bits), end};
    const uint64_t num_bits = 8 * static_cast<uint64_t>(end - reader.from);
    Writer writer{packed.data};
    for (const int64_t count : counts) {
        size_t left = static_cast<size_t>(count) * static_cast<size_t>(bits);
        if (!several.empty()) left = read_several(several.data(), &reader, &writer, left);
        require(left != kNone, kNoCode);
        read_each(table, reader, writer, left, bits);
    }
    require(reader.num_read <= num_bits && num_bits - reader.num_read < 8 && reader.buffer == 0,
            "payload: its size does not fit the counts; it is corrupt");
}

}  // namespace thinwire
