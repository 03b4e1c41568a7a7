// Splits the work of a kernel over threads. No result depends on how it is split: pieces begin where an element's bytes, and
// its random number, depend on nothing in the piece before.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <type_traits>

#include "kernels.hpp"

namespace thinwire {

#if !defined(THINWIRE_PIECE)  // the sanitizers' programs split smaller calls
#define THINWIRE_PIECE (1 << 16)
#endif

constexpr size_t kPiece = THINWIRE_PIECE;  // elements: more work than it takes to wake a thread

// Calls work(i) for every i < count, from several threads at once unless they work for another caller. Throws what the
// first failed call threw, after all have ended.
void run_parallel(size_t count, const std::function<void(size_t)>& work);

inline bool splits(size_t numel) { return numel >= 2 * kPiece && threads() > 1; }

inline size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

// Calls work(segment, begin, end) for ranges of elements that make up all segments. Ranges begin at multiples of `unit`: a
// number, or a function of the segment.
template <typename Segment, typename Unit, typename Work>
void for_each_piece(const std::vector<Segment>& segments, const Unit& unit, const Work& work) {
    size_t numel = 0;
    for (const Segment& segment : segments) numel += segment.numel;
    if (!splits(numel)) {
        for (size_t s = 0; s < segments.size(); ++s) work(s, size_t{0}, segments[s].numel);
        return;
    }
    struct Piece {
        size_t segment, begin, end;
    };
    std::vector<Piece> pieces;
    for (size_t s = 0; s < segments.size(); ++s) {
        size_t size = kPiece;
        if constexpr (std::is_convertible_v<Unit, size_t>)
            size = round_up(size, unit);
        else
            size = round_up(size, unit(s));
        for (size_t begin = 0; begin < segments[s].numel; begin += size)
            pieces.push_back({s, begin, std::min(segments[s].numel, begin + size)});
    }
    run_parallel(pieces.size(), [&](size_t i) { work(pieces[i].segment, pieces[i].begin, pieces[i].end); });
}

// Calls work(begin, end) for ranges of one segment of n elements.
template <typename Work>
void for_each_range(size_t n, size_t unit, const Work& work) {
    if (!splits(n)) return work(size_t{0}, n);
    const size_t size = round_up(kPiece, unit);
    run_parallel((n + size - 1) / size, [&](size_t i) { work(i * size, std::min(n, (i + 1) * size)); });
}

inline void raise_to(std::atomic<int32_t>& largest, int32_t x) {
    for (int32_t seen = largest; seen < x && !largest.compare_exchange_weak(seen, x);) {
    }
}

// One range per thread: what each of them collects is put together in order.
struct Ranges {
    size_t count, size;
};

inline Ranges ranges_of(size_t n, size_t unit) {
    if (!splits(n)) return {1, n};
    const size_t wanted = std::min(static_cast<size_t>(threads()), n / kPiece);
    const size_t size = round_up((n + wanted - 1) / wanted, unit);
    return {(n + size - 1) / size, size};
}

}  // namespace thinwire
