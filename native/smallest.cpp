// Ascending indices by the smallest of Elias-Fano, a bitmap and packed gaps. Per segment: a byte that names the code, and
// the code. The size depends on the indices. A plain 32 bits an index is never smaller.
#include "bitstream.hpp"
#include "indices.hpp"

namespace thinwire {

namespace {

constexpr uint8_t kBySize = 0, kByGaps = 1;

// Gaps between indices, less one, in blocks of 128: a byte with the bits of the largest, then that many bits for each.
constexpr size_t kGaps = 128;

int bits_of(uint32_t value) {
    int bits = 0;
    while (value >> bits) ++bits;
    return bits;
}

void encode_gaps(const int32_t* indices, size_t count, std::vector<uint8_t>& out) {
    for (size_t at = 0; at < count; at += kGaps) {
        const size_t end = std::min(count, at + kGaps);
        uint32_t any = 0;  // as many bits as the largest
        for (size_t j = at; j < end; ++j) any |= gap_at(indices, j);
        const int width = bits_of(any);
        out.push_back(static_cast<uint8_t>(width));
        const size_t start = out.size();
        out.resize(start + words_nbytes(end - at, width));
        BitWriter writer(out.data() + start, 0);
        for (size_t j = at; j < end; ++j) writer.put(gap_at(indices, j), width);
        writer.finish();
    }
}

// Returns the number of bytes read; 0 if they are no such code.
size_t decode_gaps(const uint8_t* in, size_t nbytes, size_t numel, int32_t* indices, size_t count) {
    size_t read = 0;
    int64_t before = -1;
    for (size_t at = 0; at < count; at += kGaps) {
        const size_t size = std::min(kGaps, count - at);
        if (read == nbytes || in[read] > 31) return 0;
        const int width = in[read++];
        const size_t num_bits = size * static_cast<size_t>(width), end = read + words_nbytes(size, width);
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

}  // namespace

std::vector<uint8_t> smallest_encode(Indices indices, const Counts& counts, const Counts& numels) {
    std::vector<uint8_t> out, gaps;
    const std::vector<IndexCode> codes = checked_codes(counts, numels, indices.numel);
    const int32_t* from = indices.data;
    for (size_t s = 0; s < codes.size(); ++s) {
        const size_t count = static_cast<size_t>(counts[s]), at = out.size(), nbytes = codes[s].nbytes();
        check_ascending(from, count, numels[s]);
        gaps.clear();
        if (nbytes > 0) encode_gaps(from, count, gaps);
        if (gaps.size() < nbytes) {
            out.push_back(kByGaps);
            out.insert(out.end(), gaps.begin(), gaps.end());
        } else {
            out.resize(at + 1 + nbytes);
            out[at] = kBySize;
            encode_indices(from, count, codes[s], out.data() + at + 1);
        }
        from += count;
    }
    return out;
}

void smallest_decode(Payload payload, const Counts& counts, const Counts& numels, IndicesOut indices) {
    const std::vector<IndexCode> codes = checked_codes(counts, numels, indices.numel);
    const uint8_t* from = payload.data;
    size_t nbytes = payload.numel;
    int32_t* to = indices.data;
    for (size_t s = 0; s < codes.size(); ++s) {
        const size_t count = static_cast<size_t>(counts[s]);
        require(nbytes > 0 && from[0] <= kByGaps, "payload: expected the byte that names how indices are coded");
        size_t read = codes[s].nbytes();
        bool ok;
        if (from[0] == kByGaps) {
            read = decode_gaps(from + 1, nbytes - 1, static_cast<size_t>(numels[s]), to, count);
            ok = read > 0;
        } else {
            ok = read < nbytes && decode_indices(from + 1, codes[s], static_cast<uint64_t>(numels[s]), to, count);
        }
        require(ok, "payload: its indices are corrupt");
        to += count;
        from += 1 + read;
        nbytes -= 1 + read;
    }
    require(nbytes == 0, "payload: bytes are left after the indices");
}

}  // namespace thinwire
