// What crosses a connection between two workers: frames, each a header of 32 bytes and, for data, a piece of a message.
//
// Messages of one direction are numbered from 0, in each of several streams, which the upper bits of a number name. A message is
// cut into chunks, which travel over any of the connections, in any order, and more than once if a connection was lost or is
// slow. So a chunk says which bytes of which message it has.
//
// A receiver keeps chunks that come before it expects their message, within a bound. A chunk costs its bytes and `kCost`. The sender
// adds up the cost of all chunks that it has sent, each counted once, and subtracts `total` of the latest acknowledgement. Near the
// bound it asks about a message, and a chunk that would exceed the bound waits until the receiver expects that message.
// Everything in a header comes from the network: `check` bounds it before memory is taken or written.
#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace thinwire::wire {

enum Kind : uint32_t {
    kData = 0x7457'0001,  // a chunk
    // number: how many bytes of this connection the sender of the frame has taken; total: the cost of all chunks that have come, over
    // all connections, for messages that it expected; offset: 0, or 1 + the number of a message that it expects
    kAck = 0x7457'0002,
    kAsk = 0x7457'0003,   // number: 0, for an acknowledgement at once; or 1 + that of a message, for one once it is expected
    kWant = 0x7457'0004,  // number: how many connections would fill the line
    kBye = 0x7457'0005,   // all is said, and all that was sent has been acknowledged
    kFail = 0x7457'0006,  // number: the rank that the sender of the frame has lost
};

struct Header {  // little-endian, as every machine that we run on
    uint32_t kind, length;
    uint64_t number, total, offset;
};
static_assert(sizeof(Header) == 32);

constexpr uint32_t kMaxChunk = 1 << 20;
constexpr uint32_t kNearChunk = 1 << 18;    // on a short line: few system calls
constexpr uint32_t kMinChunk = 4096;        // but for the last of a message: so many small ones would cost memory
constexpr uint64_t kMaxTotal = 1ull << 46;  // bytes of a message
constexpr uint64_t kMaxAhead = 1 << 20;     // messages that a peer may be ahead of this worker, in a stream and in all
constexpr int kStreamShift = 40;
constexpr uint64_t kInStream = (1ull << kStreamShift) - 1;
constexpr uint64_t kNumbers = 1ull << 63;
constexpr uint64_t kCost = 256;             // bytes of memory that it takes to keep a chunk, besides its own

// Empty if a header is possible at all; else what is wrong with it.
inline std::string check(const Header& h) {
    if (h.kind < kData || h.kind > kFail) return "sent what is no frame";
    if (h.kind != kData) return h.length == 0 ? "" : "sent a control frame with a body";
    if (h.total > kMaxTotal) return "announced a message of " + std::to_string(h.total) + " bytes";
    if (h.length == 0 || h.length > kMaxChunk) return "sent a chunk of " + std::to_string(h.length) + " bytes";
    if (h.offset >= h.total || h.length > h.total - h.offset) return "sent a chunk beyond the end of its message";
    if (h.length < kMinChunk && h.offset + h.length != h.total) return "sent a chunk that is too small";
    return "";
}

// Which messages of a stream have come whole.
struct Whole {
    uint64_t below = 0;
    std::set<uint64_t> above;

    bool has(uint64_t index) const { return index < below || above.count(index); }
    void add(uint64_t index) {
        above.insert(index);
        while (!above.empty() && *above.begin() == below) above.erase(above.begin()), ++below;
    }
};

// Copies of chunks. The memory of those of short lines is used again: the first touch of a fresh page costs more than copying it.
class Copies {
  public:
    struct Return {
        Copies* owner = nullptr;  // null for chunks of other sizes
        void operator()(uint8_t* bytes) const {
            std::unique_ptr<uint8_t[]> memory(bytes);
            if (owner && owner->spare_.size() < kSpare) owner->spare_.push_back(std::move(memory));
        }
    };
    using Bytes = std::unique_ptr<uint8_t[], Return>;

    Bytes take(uint32_t length) {
        const bool is_large = length == kNearChunk;
        if (!is_large || spare_.empty()) return Bytes(new uint8_t[length], Return{is_large ? this : nullptr});
        Bytes bytes(spare_.back().release(), Return{this});
        spare_.pop_back();
        return bytes;
    }

  private:
    static constexpr size_t kSpare = 32;
    std::vector<std::unique_ptr<uint8_t[]>> spare_;
};

// The chunks of one message that have come, or are on their way in.
struct Incoming {
    struct Range {
        uint32_t length = 0, reached = 0;  // reached: the most that one connection has brought of it
        bool is_done = false;
        Copies::Bytes early;  // holds the bytes until the message's own memory is known
    };
    uint64_t total = 0, left = 0;
    uint8_t* data = nullptr;  // null until the message is expected
    int asks = 0;
    std::map<uint64_t, Range> ranges;

    // The range of a chunk, new or known; null if it overlaps another one, which no honest sender does.
    Range* range(const Header& h) {
        auto next = ranges.lower_bound(h.offset);
        if (next != ranges.end() && next->first == h.offset)
            return next->second.length == h.length ? &next->second : nullptr;
        if (next != ranges.end() && next->first < h.offset + h.length) return nullptr;
        if (next != ranges.begin()) {
            auto before = std::prev(next);
            if (before->first + before->second.length > h.offset) return nullptr;
        }
        Range& range = ranges.emplace_hint(next, h.offset, Range{})->second;
        range.length = h.length;
        return &range;
    }
};

}  // namespace thinwire::wire
