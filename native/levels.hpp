// The levels of a quantizer, and the plain loops over them. Faster ones: levels_x86.hpp.
//
// The code of the level below r is the number of inner levels that are at most r. An element takes the level above if
// u * width is less than its distance from the level below; so an element at a level keeps its value.
#pragma once

#include "buckets.hpp"

namespace thinwire {

constexpr int kMaxLevels = 256, kFewLevels = 16;

// Neighbouring levels of one cell of numbers: low <= r < middle or middle <= r < high, for every r in the cell.
struct alignas(16) Cell {
    float low, middle, high;
    int32_t code;  // of `low`
};

// Cells of numbers whose sign and upper bits are equal, so that a shift finds the cell. All smaller magnitudes share the
// first cell of their sign, all larger ones the last. Exists if no cell has more than one inner level.
struct Cells {
    static constexpr int kMaxPerSign = 2048;  // 64 KB in all
    static constexpr int kWidest = 23, kNarrowest = 14;
    int shift = 0, first = 0, per_sign = 0;
    std::vector<Cell> cells;

    Cells() = default;
    explicit Cells(const std::vector<float>& levels) {
        for (int bits = kWidest; bits >= kNarrowest && cells.empty(); --bits) build(levels, bits);
    }

    explicit operator bool() const { return !cells.empty(); }

    THINWIRE_INLINE const Cell& find(float r) const {
        const int32_t above = (magnitude(r) >> shift) - first;
        const int32_t cell = std::min(std::max(above, 0), per_sign - 1);
        return cells[static_cast<size_t>(cell + (sign_bit(r) ? per_sign : 0))];
    }

private:
    void build(const std::vector<float>& levels, int bits);
};

// Fills `cells` unless there are too many, or one has two inner levels.
inline void Cells::build(const std::vector<float>& levels, int bits) {
    const int last = static_cast<int>(levels.size()) - 1;
    int32_t smallest = kInfinityBits, largest = 0;
    for (int j = 1; j < last; ++j) {
        if (levels[j] != 0) smallest = std::min(smallest, magnitude(levels[j]));
        largest = std::max(largest, magnitude(levels[j]));
    }
    const int32_t below = std::max((smallest >> bits) - 1, 0), count = (largest >> bits) - below + 1;
    if (count > kMaxPerSign) return;
    std::vector<Cell> found(2 * static_cast<size_t>(count));
    int reached = 1;
    const auto count_at_most = [&](float r) {  // r ascends from call to call
        while (reached < last && levels[reached] <= r) ++reached;
        return reached - 1;
    };
    for (int32_t i = 0; i < 2 * count; ++i) {
        const bool negative = i < count;
        const int32_t at = negative ? count - 1 - i : i - count;
        // Magnitudes of the cell; the first one holds zero, the last one everything larger.
        const int32_t inner = at == 0 ? 0 : (below + at) << bits;
        const int32_t outer = at == count - 1 ? kInfinityBits : ((below + at + 1) << bits) - 1;
        const int lower = count_at_most(negative ? -float_from_bits(outer) : float_from_bits(inner));
        if (count_at_most(negative ? -float_from_bits(inner) : float_from_bits(outer)) > lower + 1) return;
        const int code = std::min(lower, last - 2);  // at the end, every r of the cell reaches `middle`
        found[static_cast<size_t>(negative ? count + at : at)] = {levels[code], levels[code + 1], levels[code + 2], code};
    }
    shift = bits, first = below, per_sign = count;
    cells = std::move(found);
}

// Levels that are consecutive powers of two and their negatives, with zero or without. Bits of a float without its mantissa
// are the power of two below its magnitude, so no table is searched.
struct Powers {
    static constexpr int32_t kNext = 1 << 23;  // from the bits of a power to those of the next

    int32_t least = 0, most = 0;  // bits of the smallest and the largest magnitude
    int32_t around_zero = 0;      // bits of the width of the gap that an element just above zero lies in
    int32_t below_zero = 0;       // bits of the lower end of that gap
    int32_t code = 0;             // and its code
    int32_t code_shift = 0;       // 1 if zero is no level, which negative levels would have stood below

    explicit operator bool() const { return most > 0; }

    Powers() = default;
    explicit Powers(const std::vector<float>& levels) {
        const size_t count = levels.size(), half = count / 2;
        const bool zero = count % 2 == 1;
        if (half < 2 || (zero && levels[half] != 0)) return;
        const int32_t smallest = magnitude(levels[count - half]);
        if (smallest < kNext || smallest % kNext != 0) return;  // not a normal power of two
        for (size_t i = 0; i < half; ++i) {
            const float power = float_from_bits(smallest + static_cast<int32_t>(i) * kNext);
            if (levels[count - half + i] != power || levels[half - 1 - i] != -power) return;
        }
        least = smallest, most = magnitude(levels.back());
        below_zero = zero ? 0 : least | INT32_MIN;
        around_zero = zero ? least : least + kNext;
        code = static_cast<int32_t>(count - half) - 1;
        code_shift = zero ? 0 : 1;
    }
};

struct Table {
    int size;                     // number of levels, rounded up to a power of two
    float value[kMaxLevels + 1];  // padded with the last level
    float threshold[kMaxLevels];  // element j is level j for 1 <= j <= num_levels - 2; all others are infinite
    Cells cells;                  // for more than a few levels that are no powers
    Powers powers;

    Table(const std::vector<float>& levels, const Buckets& buckets, bool encodes) {
        const int num_levels = static_cast<int>(levels.size()), last = num_levels - 1;
        require(num_levels >= 2 && num_levels <= kMaxLevels, "levels: expected 2 to 256");
        require(buckets.bits <= 8 && num_levels <= 1 << buckets.bits, "bits: expected 1 to 8, enough for the levels");
        size = 1 << buckets.bits;
        for (int j = 0; j <= kMaxLevels; ++j) value[j] = levels[std::min(j, last)];
        for (int j = 0; j < kMaxLevels; ++j)
            threshold[j] = j >= 1 && j < last ? value[j] : std::numeric_limits<float>::infinity();
        if (!encodes) return;
        powers = Powers(levels);
        if (!powers && size > kFewLevels && num_levels > 3) cells = Cells(levels);
    }

    bool few() const { return size <= kFewLevels; }
};

// Elements of one bucket, at most a chunk: `u` has their random numbers, `inv` is the inverse of the scale.
struct Elements {
    const float *x, *u;
    size_t n;
    float scale, inv;

    Elements from(size_t at) const { return {x + at, u + at, n - at, scale, inv}; }
};

// Elements of one bucket, at most a chunk, and where their random numbers come from.
struct Drawn {
    const float* x;
    size_t n;
    float scale, inv;
    Key key;
    uint32_t position;
};

THINWIRE_INLINE int32_t code_below(const Table& table, float r) {
    int32_t code = 0;
    if (table.few()) {
        for (int j = 1; j < kFewLevels - 1; ++j) code += r >= table.threshold[j];
    } else if (table.cells) {
        const Cell& cell = table.cells.find(r);
        code = cell.code + (r >= cell.middle);
    } else {
        for (int step = kMaxLevels / 2; step > 0; step /= 2)
            code += step & -static_cast<int32_t>(r >= table.threshold[code + step]);
    }
    return code;
}

// Codes, and residuals unless null.
inline void encode_plainly(const Table& table, const Elements& part, uint8_t* codes, float* residual) {
    for (size_t i = 0; i < part.n; ++i) {
        const float x = part.x[i], r = x * part.inv;
        int32_t code = code_below(table, r);
        const float low = table.value[code], width = table.value[code + 1] - low;
        code += r - low > part.u[i] * width;
        codes[i] = static_cast<uint8_t>(code);
        if (residual) residual[i] = x - table.value[code] * part.scale;
    }
}

inline void decode_plainly(const Table& table, const uint8_t* codes, size_t n, float step, float* out) {
    for (size_t i = 0; i < n; ++i) out[i] += table.value[codes[i]] * step;
}

}  // namespace thinwire
