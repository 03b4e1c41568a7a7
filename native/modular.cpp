// Moniqua: values modulo a number, rounded to codes of a few bits, and the crossings of levels between two workers' codes.
// Codes of all segments follow each other without gaps, so that a chunk of codes may hold parts of several segments.
#include <cmath>

#include "buckets.hpp"
#include "modular_x86.hpp"

namespace thinwire {

namespace {

constexpr double kMaxTurns = 0x1p30;

struct Wheel {
    float modulus, half;  // half is exactly half of modulus
    double inverse;
    explicit Wheel(float m) : modulus(m), half(m / 2), inverse(1.0 / static_cast<double>(m)) {}
};

// x + half modulo the modulus, less half, as PyTorch's `remainder` rounds it; and the number of turns taken off.
THINWIRE_INLINE float wrapped(float x, const Wheel& w, int32_t& turns) {
    const double a = static_cast<double>(x + w.half), b = w.modulus;
    double n = std::floor(a * w.inverse);
    double rest = a - b * n;
    n += rest < 0 ? -1.0 : rest >= b ? 1.0 : 0.0;  // the product may be rounded across a whole number
    rest = a - b * n;
    n = n > -kMaxTurns ? n : -kMaxTurns;
    turns = static_cast<int32_t>(n < kMaxTurns ? n : kMaxTurns);
    return static_cast<float>(rest) - w.half;
}

THINWIRE_INLINE int32_t code_of(float wrapped, float inverse, int32_t last, float u) {
    const float t = (wrapped * inverse + static_cast<float>(last)) * 0.5f;
    const float bounded = t + u > 0.0f ? t + u : 0.0f;  // no number counts as 0
    return static_cast<int32_t>(bounded < static_cast<float>(last) ? bounded : static_cast<float>(last));
}

// Odd numbers, the same on all workers, by which the check weighs elements.
THINWIRE_INLINE int32_t odd_of(Key key, uint32_t counter) { return static_cast<int32_t>(hash_of(key, counter) | 1u); }

struct Checked {
    uint64_t turns = 0, codes = 0;  // modulo 2^64
    int32_t largest = 0;
};

THINWIRE_CLONES void encode_run(const float* x, size_t n, const Wheel* wheel, float inverse, int32_t last, Key key,
                                uint32_t position, uint8_t* codes, Checked* checked) {
    const Wheel w = *wheel;
    uint32_t counter = counter_at(key, position);
    uint64_t turns_sum = 0, codes_sum = 0;
    for (size_t i = 0; i < n; ++i, counter += kCounterStep) {
        int32_t turns;
        const float y = wrapped(x[i], w, turns);
        const int32_t code = code_of(y, inverse, last, uniform_of(key, counter));
        codes[i] = static_cast<uint8_t>(code);
        const int64_t odd = odd_of(key, counter);
        turns_sum += static_cast<uint64_t>(odd * turns);
        codes_sum += static_cast<uint64_t>(odd * code);
    }
    checked->turns += turns_sum;
    checked->codes += codes_sum;
    checked->largest = std::max(checked->largest, max_magnitude(x, n));
}

THINWIRE_CLONES int32_t largest_of(const float* x, size_t n) { return max_magnitude(x, n); }

// Whether float32 serves for elements up to this magnitude.
bool is_fast(int32_t largest, const Wheel& w) {
#ifdef THINWIRE_X86
    if (!has_fma() || largest >= kInfinityBits || !(w.half >= kMinScale && w.modulus <= kMaxScale)) return false;
    return (static_cast<double>(float_from_bits(largest)) + 4.0 * static_cast<double>(w.half)) * w.inverse < kMaxFast;
#else
    (void)largest, (void)w;
    return false;
#endif
}

void encode_part(const float* x, size_t n, const Wheel& wheel, float inverse, int32_t last, Key key, uint32_t position,
                 uint8_t* codes, Checked* checked) {
    size_t done = 0;
#ifdef THINWIRE_X86
    const int32_t largest = largest_of(x, n);
    if (is_fast(largest, wheel)) {
        checked->largest = std::max(checked->largest, largest);
        done = encode_fast(x, n, wheel.modulus, wheel.half, inverse, last, key, position, codes, &checked->codes);
    }
#endif
    encode_run(x + done, n - done, &wheel, inverse, last, key, position + static_cast<uint32_t>(done), codes + done,
               checked);
}

// The crossings between two codes: their difference modulo `last`, between -(last - 1) / 2 and (last - 1) / 2.
THINWIRE_INLINE int32_t crossing(int32_t theirs, int32_t own, int32_t last) {
    const int32_t half = (last - 1) / 2, k = theirs - own;
    return k > half ? k - last : k < -half ? k + last : k;
}

THINWIRE_CLONES void sum_run(const uint8_t* own, const uint8_t* theirs, size_t n, int32_t last, Key key,
                             uint32_t position, uint64_t* sums) {
    uint32_t counter = counter_at(key, position);
    uint64_t check = 0;
    int32_t size = 0, square = 0;  // a chunk's, which fit
    for (size_t i = 0; i < n; ++i, counter += kCounterStep) {
        const int32_t k = crossing(theirs[i], own[i], last);
        check += static_cast<uint64_t>(static_cast<int64_t>(odd_of(key, counter)) * k);
        size += k < 0 ? -k : k;
        square += k * k;
    }
    sums[0] += check, sums[1] += static_cast<uint64_t>(size), sums[2] += static_cast<uint64_t>(square);
}

void sum_part(const uint8_t* own, const uint8_t* theirs, size_t n, int32_t last, Key key, uint32_t position,
              uint64_t* sums) {
    size_t done = 0;
#ifdef THINWIRE_X86
    if (has_fma()) done = sum_fast(own, theirs, n, last, key, position, sums);
#endif
    sum_run(own + done, theirs + done, n - done, last, key, position + static_cast<uint32_t>(done), sums);
}

THINWIRE_CLONES void crossings_run(const uint8_t* own, const uint8_t* theirs, size_t n, int32_t last, float weight,
                                   float* change) {
    for (size_t i = 0; i < n; ++i) change[i] += static_cast<float>(crossing(theirs[i], own[i], last)) * weight;
}

THINWIRE_CLONES void add_run(const float* change, float* out, size_t n) {
    for (size_t i = 0; i < n; ++i) out[i] += change[i];
}

struct Recovered {
    float own_step, their_step, weight;
};

THINWIRE_CLONES void recovered_run(const float* x, const uint8_t* own, const uint8_t* theirs, size_t n, int32_t last,
                                   const Wheel* wheel, Recovered r, float* change) {
    const Wheel w = *wheel;
    for (size_t i = 0; i < n; ++i) {
        int32_t turns;
        const float error = static_cast<float>(2 * own[i] - last) * r.own_step - wrapped(x[i], w, turns);
        const float difference = wrapped(static_cast<float>(2 * theirs[i] - last) * r.their_step - x[i], w, turns);
        change[i] += (difference - error) * r.weight;
    }
}

void recovered_part(const float* x, const uint8_t* own, const uint8_t* theirs, size_t n, int32_t last, const Wheel& wheel,
                    bool fast, Recovered r, float* change) {
    size_t done = 0;
#ifdef THINWIRE_X86
    if (fast) {
        const Recovering recovering{wheel.modulus, wheel.half, r.own_step, r.their_step, r.weight};
        done = recover_fast(x, own, theirs, n, last, &recovering, change);
    }
#else
    (void)fast;
#endif
    recovered_run(x + done, own + done, theirs + done, n - done, last, &wheel, r, change + done);
}

// A payload of one bucket: its scale, then the codes, which are unpacked chunk by chunk.
class Codes {
  public:
    Codes(Payload p, size_t numel, int bits) : data_(p.data + sizeof(float)), numel_(numel), bits_(bits) {
        require(bits >= 1 && bits <= 8, "bits: expected 1 to 8");
        require(p.numel == sizeof(float) + code_nbytes(numel, bits), "payload: its size does not fit the segments");
        scale = load<float>(p.data);
    }
    // From `position` to the end of its chunk.
    const uint8_t* at(size_t position) {
        const size_t start = position / kChunk * kChunk;
        if (start != start_) {
            unpack(start);
            start_ = start;
        }
        return codes_ + (position - start);
    }
    float scale;

  private:
    void unpack(size_t start);
    const uint8_t* data_;
    size_t numel_;
    int bits_;
    size_t start_ = SIZE_MAX;
    alignas(64) uint8_t codes_[kChunk];
};

THINWIRE_CLONES void unpack_clone(int bits, const uint8_t* in, size_t n, uint8_t* codes) {
    unpack_codes(bits, in, n, codes);
}

THINWIRE_CLONES void pack_clone(int bits, const uint8_t* codes, size_t n, uint8_t* out) {
    pack_codes(bits, codes, n, out);
}

void Codes::unpack(size_t start) {
    unpack_clone(bits_, data_ + start / 8 * static_cast<size_t>(bits_), std::min(kChunk, numel_ - start), codes_);
}

// Calls `act(segment, start, n, position)` for runs of elements within one segment and one chunk of codes.
template <typename Segment, typename Act>
void for_each_run(const std::vector<Segment>& segments, Act act) {
    size_t position = 0;
    for (const Segment& s : segments)
        for (size_t at = 0; at < s.numel;) {
            const size_t n = std::min(s.numel - at, kChunk - position % kChunk);
            prefetch(s.data + at + n, std::min(kChunk, s.numel - at - n));
            act(s, at, n, position);
            at += n, position += n;
        }
}

template <typename Segment>
size_t total(const std::vector<Segment>& segments) {
    size_t numel = 0;
    for (const Segment& s : segments) numel += s.numel;
    return numel;
}

std::vector<Codes> opened(const Payloads& payloads, size_t numel, int bits, const std::vector<float>& weights) {
    require(!payloads.empty() && weights.size() + 1 == payloads.size(), "weights: expected one per other worker");
    std::vector<Codes> codes;
    for (const Payload& p : payloads) codes.emplace_back(p, numel + 1, bits);
    return codes;
}

}  // namespace

std::tuple<uint64_t, float> modular_encode(const Inputs& xs, Bytes out, uint64_t key, int bits, float modulus) {
    const size_t numel = total(xs);
    require(bits >= 1 && bits <= 8, "bits: expected 1 to 8");
    require(out.numel == sizeof(float) + code_nbytes(numel + 1, bits), "out: its size does not fit the segments");
    const Wheel wheel(modulus);
    const int32_t last = (1 << bits) - 1;
    const float scale = stored_scale(wheel.half, true, kMinScale), inverse = static_cast<float>(last) / scale;
    const Key k(key);
    alignas(64) uint8_t codes[kChunk];
    uint8_t* to = out.data + sizeof(float);
    Checked checked;
    for_each_run(xs, [&](const Input& x, size_t at, size_t n, size_t position) {
        encode_part(x.data + at, n, wheel, inverse, last, k, static_cast<uint32_t>(position), codes + position % kChunk,
                    &checked);
        if ((position + n) % kChunk == 0) {
            pack_clone(bits, codes, kChunk, to);
            to += kChunk / 8 * static_cast<size_t>(bits);
        }
    });
    const float u = uniform_of(k, counter_at(k, static_cast<uint32_t>(numel)));
    codes[numel % kChunk] = static_cast<uint8_t>(code_of(wheel.half, inverse, last, u));
    for (size_t i = numel % kChunk + 1; i % 8; ++i) codes[i] = 0;
    pack_clone(bits, codes, numel % kChunk + 1, to);
    const bool finite = checked.largest < kInfinityBits;
    store(out.data, finite ? scale : std::numeric_limits<float>::quiet_NaN());
    if (!finite || !usable(scale)) std::fill(out.data + sizeof(float), out.data + out.numel, uint8_t{0});
    const uint64_t check = checked.turns * static_cast<uint64_t>(last) + checked.codes;
    return {check, float_from_bits(checked.largest)};
}

std::vector<int64_t> modular_sums(Payload own, Payload theirs, size_t numel, uint64_t key, int bits) {
    Codes mine(own, numel + 1, bits), others(theirs, numel + 1, bits);
    uint64_t sums[3] = {};
    for (size_t at = 0; at < numel; at += kChunk)
        sum_part(mine.at(at), others.at(at), std::min(kChunk, numel - at), (1 << bits) - 1, Key(key),
                 static_cast<uint32_t>(at), sums);
    return {static_cast<int64_t>(sums[0]), static_cast<int64_t>(sums[1]), static_cast<int64_t>(sums[2])};
}

void modular_add(const Outputs& outs, const Payloads& payloads, const std::vector<float>& weights, int bits) {
    std::vector<Codes> codes = opened(payloads, total(outs), bits, weights);
    float change[kChunk];
    for_each_run(outs, [&](const Output& out, size_t at, size_t n, size_t position) {
        std::fill_n(change, n, 0.0f);
        for (size_t k = 1; k < codes.size(); ++k)
            crossings_run(codes[0].at(position), codes[k].at(position), n, (1 << bits) - 1, weights[k - 1], change);
        add_run(change, out.data + at, n);
    });
}

bool modular_recover_add(const Outputs& outs, Input own, const Payloads& payloads, const std::vector<float>& weights,
                         int bits, float modulus) {
    require(own.numel == total(outs), "own: expected the segments' elements");
    std::vector<Codes> codes = opened(payloads, own.numel, bits, weights);
    const Wheel wheel(modulus);
    const int32_t last = (1 << bits) - 1;
    const float steps = static_cast<float>(last);
    float change[kChunk];
    int32_t largest = 0;
    for_each_run(outs, [&](const Output& out, size_t at, size_t n, size_t position) {
        std::fill_n(change, n, 0.0f);
        const bool fast = is_fast(largest_of(own.data + position, n), wheel);
        for (size_t k = 1; k < codes.size(); ++k) {
            const Recovered r{codes[0].scale / steps, codes[k].scale / steps, weights[k - 1]};
            const bool bounded = std::fabs(codes[0].scale) <= wheel.modulus && std::fabs(codes[k].scale) <= wheel.modulus;
            recovered_part(own.data + position, codes[0].at(position), codes[k].at(position), n, last, wheel,
                           fast && bounded, r, change);
        }
        largest = std::max(largest, max_magnitude(change, n));
        add_run(change, out.data + at, n);
    });
    return largest < kInfinityBits;
}

}  // namespace thinwire
