// Shared by the codes for ascending indices: `indices`, `smallest` and `rice`.
#pragma once

#include "kernels.hpp"

namespace thinwire {

// How a segment's indices are coded in a size that is known beforehand: Elias-Fano or a bitmap.
struct IndexCode {
    bool bitmap;
    int low_bits;        // of Elias-Fano
    uint64_t mark_bits;  // the bitmap, or the high parts in unary
    uint64_t num_bits;   // 0 where none or all are kept
    size_t nbytes() const { return (num_bits + 7) / 8; }
};

// The code of each segment. Throws unless counts, numels and the number of indices fit each other.
std::vector<IndexCode> checked_codes(const Counts& counts, const Counts& numels, size_t num_indices);

// Throws unless indices ascend strictly inside their segment.
void check_ascending(const int32_t* indices, size_t count, int64_t numel);

void encode_indices(const int32_t* indices, size_t count, const IndexCode& code, uint8_t* out);

// False if no encoder writes these bytes.
bool decode_indices(const uint8_t* in, const IndexCode& code, uint64_t numel, int32_t* indices, size_t count);

// The gap before index j, less one.
inline uint32_t gap_at(const int32_t* indices, size_t j) {
    return static_cast<uint32_t>(j == 0 ? indices[0] : indices[j] - indices[j - 1] - 1);
}

// Bytes of `count` words of `width` bits.
inline size_t words_nbytes(size_t count, int width) { return (count * static_cast<size_t>(width) + 7) / 8; }

}  // namespace thinwire
