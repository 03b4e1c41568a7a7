// CHOCO and DeepSqueeze: messages are decoded and applied part by part, so that every vector in memory is read and written
// once. Codes of up to 8 bits are decoded in the loop that applies them.
#include "buckets.hpp"

namespace thinwire {

namespace {

// Elements of a message, or of a sum of messages: floats or doubles, or codes of evenly spaced levels `step` apart.
template <typename Float>
struct Values {
    const Float* values;
    THINWIRE_INLINE Float at(size_t i) const { return values[i]; }
};

using Floats = Values<float>;
using Doubles = Values<double>;

struct Codes {
    const uint8_t* codes;
    float step;
    int last;
    THINWIRE_INLINE float at(size_t i) const { return static_cast<float>(2 * codes[i] - last) * step; }
};

// Weights of a round: of the own message, of the sum of the others, and the step size.
template <typename Float>
struct Weights {
    Float own, others, step;
};

// h += own;  gap += w0 own + w1 theirs;  x += step gap.
template <typename Own, typename Theirs>
THINWIRE_INLINE void choco(float* x, float* h, double* gap, Own own, Theirs theirs, Weights<double> w, size_t n) {
    THINWIRE_INDEPENDENT
    for (size_t i = 0; i < n; ++i) {
        const float mine = own.at(i);
        const double sum = gap[i] + mine * w.own + theirs.at(i) * w.others;
        h[i] += mine, gap[i] = sum;
        x[i] += static_cast<float>(sum * w.step);
    }
}

// lost -= own, where given;  x += step (w1 theirs - w0 own).
template <typename Own, typename Theirs>
THINWIRE_INLINE void squeeze(float* x, float* lost, Own own, Theirs theirs, Weights<float> w, size_t n) {
    if (lost) {
        THINWIRE_INDEPENDENT
        for (size_t i = 0; i < n; ++i) {
            const float mine = own.at(i);
            lost[i] -= mine;
            x[i] += (theirs.at(i) * w.others - mine * w.own) * w.step;
        }
    } else {
        THINWIRE_INDEPENDENT
        for (size_t i = 0; i < n; ++i) x[i] += (theirs.at(i) * w.others - own.at(i) * w.own) * w.step;
    }
}

THINWIRE_CLONES void run(float* x, float* h, double* gap, Floats own, Floats theirs, Weights<double> w, size_t n) {
    choco(x, h, gap, own, theirs, w, n);
}

THINWIRE_CLONES void run(float* x, float* h, double* gap, Floats own, Doubles theirs, Weights<double> w, size_t n) {
    choco(x, h, gap, own, theirs, w, n);
}

THINWIRE_CLONES void run(float* x, float* h, double* gap, Codes own, Codes theirs, Weights<double> w, size_t n) {
    choco(x, h, gap, own, theirs, w, n);
}

THINWIRE_CLONES void run(float* x, float* h, double* gap, Codes own, Doubles theirs, Weights<double> w, size_t n) {
    choco(x, h, gap, own, theirs, w, n);
}

THINWIRE_CLONES void run(float* x, float* lost, Floats own, Floats theirs, Weights<float> w, size_t n) {
    squeeze(x, lost, own, theirs, w, n);
}

THINWIRE_CLONES void run(float* x, float* lost, Codes own, Floats theirs, Weights<float> w, size_t n) {
    squeeze(x, lost, own, theirs, w, n);
}

THINWIRE_CLONES void run(float* x, float* lost, Codes own, Codes theirs, Weights<float> w, size_t n) {
    squeeze(x, lost, own, theirs, w, n);
}

template <typename Message, typename Float>
THINWIRE_INLINE void weigh(Message message, Float weight, Float* sum, size_t n, bool add) {
    if (add) {
        THINWIRE_INDEPENDENT
        for (size_t i = 0; i < n; ++i) sum[i] += message.at(i) * weight;
    } else {
        THINWIRE_INDEPENDENT
        for (size_t i = 0; i < n; ++i) sum[i] = message.at(i) * weight;
    }
}

THINWIRE_CLONES void add_weighed(Floats message, float weight, float* sum, size_t n, bool add) {
    weigh(message, weight, sum, n, add);
}

THINWIRE_CLONES void add_weighed(Floats message, double weight, double* sum, size_t n, bool add) {
    weigh(message, weight, sum, n, add);
}

THINWIRE_CLONES void add_weighed(Codes message, float weight, float* sum, size_t n, bool add) {
    weigh(message, weight, sum, n, add);
}

THINWIRE_CLONES void add_weighed(Codes message, double weight, double* sum, size_t n, bool add) {
    weigh(message, weight, sum, n, add);
}

THINWIRE_CLONES void unpack_clone(int bits, const uint8_t* in, size_t n, uint8_t* codes) {
    unpack_codes(bits, in, n, codes);
}

// Parts of messages in chunks of codes of up to 8 bits. A part lies in one bucket.
class Coded {
  public:
    using Own = Codes;
    Coded(const Payloads& payloads, const std::vector<float>& factors, const Quantizer& quantizer, const Outputs& segments)
        : factors_(factors), quantizer_(quantizer), codes_(payloads.size()) {
        require(factors.size() == payloads.size(), "factors: expected one per payload");
        require(quantizer.num_steps >= 1, "num_steps: expected at least 1");
        for (const Payload& p : payloads) {
            const size_t scales = checked_scales_nbytes(segments, p.numel, quantizer.buckets, sizeof(float));
            parts_.push_back({p.data, p.data + scales});
        }
    }
    // The elements from `at` that follow each other, of a segment of n.
    size_t reach(size_t at, size_t n) const {
        const size_t chunk = kChunk - at % kChunk, bucket = quantizer_.buckets.size - at % quantizer_.buckets.size;
        return std::min({chunk, bucket, n - at});
    }
    void enter(size_t at, size_t n) {
        if (at % kChunk) return;
        const int bits = quantizer_.buckets.bits;
        for (size_t k = 0; k < parts_.size(); ++k)
            unpack_clone(bits, parts_[k].codes + at / 8 * bits, std::min(kChunk, n - at), codes_[k].data);
    }
    Codes message(size_t k, size_t at) const {
        const float scale = load<float>(parts_[k].scales + sizeof(float) * (at / quantizer_.buckets.size));
        const float step = scale / static_cast<float>(quantizer_.num_steps) * factors_[k];
        return {codes_[k].data + at % kChunk, step, quantizer_.num_steps};
    }
    void next_segment(size_t n) {
        for (Part& part : parts_) {
            part.scales += sizeof(float) * num_buckets(n, quantizer_.buckets.size);
            part.codes += code_nbytes(n, quantizer_.buckets.bits);
        }
    }

  private:
    struct Chunk {
        alignas(64) uint8_t data[kChunk];
    };
    const std::vector<float>& factors_;
    const Quantizer& quantizer_;
    std::vector<Part> parts_;
    std::vector<Chunk> codes_;
};

// Decoded messages, each one vector of all segments.
class Dense {
  public:
    using Own = Floats;
    Dense(const Inputs& vectors, const Outputs& segments) : vectors_(vectors) {
        size_t numel = 0;
        for (const Output& s : segments) numel += s.numel;
        for (const Input& v : vectors) require(v.numel == numel, "vectors: expected the segments' elements");
    }
    size_t reach(size_t at, size_t n) const { return std::min(kChunk, n - at); }
    void enter(size_t, size_t) {}
    Floats message(size_t k, size_t at) const { return {vectors_[k].data + start_ + at}; }
    void next_segment(size_t n) { start_ += n; }

  private:
    const Inputs& vectors_;
    size_t start_ = 0;
};

// Calls `act(segment, start, size, own, others, weights)` for parts of all segments, none longer than a chunk.
template <typename Float, typename Source, typename Act>
void for_each_part(Source source, const Outputs& segments, const std::vector<Float>& weights, Float step, Act act) {
    require(!weights.empty(), "weights: expected that of the own message first");
    alignas(64) Float sum[kChunk] = {};
    for (size_t i = 0; i < segments.size(); ++i) {
        const size_t n = segments[i].numel;
        for (size_t at = 0, size; at < n; at += size) {
            size = source.reach(at, n);
            source.enter(at, n);
            const typename Source::Own own = source.message(0, at);
            if (weights.size() == 2) {
                act(i, at, size, own, source.message(1, at), Weights<Float>{weights[0], weights[1], step});
                continue;
            }
            for (size_t k = 1; k < weights.size(); ++k) add_weighed(source.message(k, at), weights[k], sum, size, k > 1);
            act(i, at, size, own, Values<Float>{sum}, Weights<Float>{weights[0], 1, step});
        }
        source.next_segment(n);
    }
}

template <typename Float>
void require_alike(const Outputs& xs, const std::vector<View<Float>>& ys, const char* message) {
    require(xs.size() == ys.size(), message);
    for (size_t i = 0; i < xs.size(); ++i) require(xs[i].numel == ys[i].numel, message);
}

// Asks for the elements of the next chunk.
template <typename Float>
void prefetch_next(const View<Float>& x, size_t at) {
    const size_t next = std::min(at + kChunk, x.numel);
    prefetch(x.data + next, std::min(kChunk, x.numel - next));
}

// The own weight becomes w0 - 1: what a message adds to the sum less what it adds to the copy.
template <typename Source>
void choco_add(Source source, const Outputs& xs, const Outputs& hs, const DoublesOut& gaps, std::vector<double> weights,
               double step) {
    if (!weights.empty()) weights[0] -= 1.0;
    for_each_part(source, xs, weights, step, [&](size_t i, size_t at, size_t n, auto own, auto others, auto w) {
        if (at % kChunk == 0) prefetch_next(xs[i], at), prefetch_next(hs[i], at), prefetch_next(gaps[i], at);
        run(xs[i].data + at, hs[i].data + at, gaps[i].data + at, own, others, w, n);
    });
}

// Every payload decoded as one vector of all segments: for codes of more than 8 bits.
std::vector<std::vector<float>> decoded(const Payloads& payloads, const std::vector<float>& factors,
                                        const Quantizer& quantizer, const Outputs& segments) {
    require(factors.size() == payloads.size(), "factors: expected one per payload");
    std::vector<std::vector<float>> vectors;
    for (size_t k = 0; k < payloads.size(); ++k) {
        size_t numel = 0;
        for (const Output& s : segments) numel += s.numel;
        std::vector<float>& vector = vectors.emplace_back(numel);
        Outputs parts;
        for (size_t i = 0, at = 0; i < segments.size(); at += segments[i++].numel)
            parts.push_back({vector.data() + at, segments[i].numel});
        quantize_decode_sum({payloads[k]}, parts, factors[k], {{quantizer}, {}});
    }
    return vectors;
}

Inputs inputs_of(const std::vector<std::vector<float>>& vectors) {
    Inputs inputs;
    for (const std::vector<float>& v : vectors) inputs.push_back({v.data(), v.size()});
    return inputs;
}

template <typename Source>
void squeeze_add(Source source, const Outputs& xs, const Outputs& losts, const std::vector<float>& weights, float step) {
    for_each_part(source, xs, weights, step, [&](size_t i, size_t at, size_t n, auto own, auto others, auto w) {
        if (at % kChunk == 0) prefetch_next(xs[i], at);
        if (at % kChunk == 0 && !losts.empty()) prefetch_next(losts[i], at);
        run(xs[i].data + at, losts.empty() ? nullptr : losts[i].data + at, own, others, w, n);
    });
}

}  // namespace

void choco_decode_add(const Outputs& xs, const Outputs& hs, const DoublesOut& gaps, const Payloads& payloads,
                      const std::vector<float>& factors, const std::vector<double>& weights, double step,
                      const Quantizer& quantizer) {
    require_alike(xs, hs, "copies: expected the segments' sizes");
    require_alike(xs, gaps, "gaps: expected the segments' sizes");
    require(payloads.size() == weights.size(), "weights: expected one per payload");
    if (quantizer.buckets.bits <= 8)
        return choco_add(Coded(payloads, factors, quantizer, xs), xs, hs, gaps, weights, step);
    const auto vectors = decoded(payloads, factors, quantizer, xs);
    choco_dense_add(xs, hs, gaps, inputs_of(vectors), weights, step);
}

void choco_dense_add(const Outputs& xs, const Outputs& hs, const DoublesOut& gaps, const Inputs& vectors,
                     const std::vector<double>& weights, double step) {
    require_alike(xs, hs, "copies: expected the segments' sizes");
    require_alike(xs, gaps, "gaps: expected the segments' sizes");
    require(vectors.size() == weights.size(), "weights: expected one per vector");
    choco_add(Dense(vectors, xs), xs, hs, gaps, weights, step);
}

void squeeze_decode_add(const Outputs& xs, const Outputs& losts, const Payloads& payloads,
                        const std::vector<float>& factors, const std::vector<float>& weights, float step,
                        const Quantizer& quantizer) {
    if (!losts.empty()) require_alike(xs, losts, "lost: expected the segments' sizes");
    require(payloads.size() == weights.size(), "weights: expected one per payload");
    if (quantizer.buckets.bits <= 8)
        return squeeze_add(Coded(payloads, factors, quantizer, xs), xs, losts, weights, step);
    const auto vectors = decoded(payloads, factors, quantizer, xs);
    const Inputs inputs = inputs_of(vectors);
    squeeze_add(Dense(inputs, xs), xs, losts, weights, step);
}

}  // namespace thinwire
