// Ascending indices by the gaps between them, less one, in a Rice code whose parameter follows from counts and numels.
#include "bitstream.hpp"
#include "indices.hpp"

namespace thinwire {

namespace {

// The width l of the low parts, and the most bits that any indices take: count (l + 1) + floor((numel - count) / 2^l),
// because gaps less one add up to numel - count at most. l makes this bound smallest.
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

void encode_segment(const int32_t* indices, size_t count, int low, std::vector<uint8_t>& out) {
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

// Returns the number of bytes read; 0 if they are no such code.
size_t decode_segment(const uint8_t* in, size_t nbytes, const Rice& code, size_t numel, int32_t* indices,
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

}  // namespace

std::vector<uint8_t> rice_encode(Indices indices, const Counts& counts, const Counts& numels) {
    checked_codes(counts, numels, indices.numel);
    std::vector<uint8_t> out;
    const int32_t* from = indices.data;
    for (size_t s = 0; s < counts.size(); ++s) {
        const size_t count = static_cast<size_t>(counts[s]);
        check_ascending(from, count, numels[s]);
        const Rice code = choose_rice(count, static_cast<uint64_t>(numels[s]));
        if (code.max_bits > 0) encode_segment(from, count, code.low_bits, out);
        from += count;
    }
    return out;
}

void rice_decode(Payload payload, const Counts& counts, const Counts& numels, IndicesOut indices) {
    checked_codes(counts, numels, indices.numel);
    const uint8_t* from = payload.data;
    size_t nbytes = payload.numel;
    int32_t* to = indices.data;
    for (size_t s = 0; s < counts.size(); ++s) {
        const size_t count = static_cast<size_t>(counts[s]), size = static_cast<size_t>(numels[s]);
        const Rice code = choose_rice(count, size);
        if (code.max_bits == 0) {
            for (size_t j = 0; j < count; ++j) to[j] = static_cast<int32_t>(j);
        } else {
            const size_t read = decode_segment(from, nbytes, code, size, to, count);
            require(read > 0, "payload: its indices are corrupt");
            from += read;
            nbytes -= read;
        }
        to += count;
    }
    require(nbytes == 0, "payload: bytes are left after the indices");
}

}  // namespace thinwire
