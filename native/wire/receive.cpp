// What comes over each connection, and where it goes.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "peer.hpp"

namespace thinwire::wire {

namespace {

constexpr uint64_t kAckNear = 1 << 19, kAckFar = 1 << 17;
constexpr int kTurns = 8;                   // of reading from one connection before the others
constexpr int kMaxAsks = 1024;              // for an acknowledgement, over one connection

}  // namespace

void Engine::read(Connection& c) {
    // What a session has taken from the socket must be read: nobody would say that it is there.
    for (int turn = 0; (turn < kTurns || c.session) && !c.is_dead && !c.is_paused; ++turn) {
        if (c.ahead_begin == c.ahead_end) c.ahead_begin = c.ahead_end = 0;
        size_t into = std::min(c.left, c.into ? c.left : scratch_.size());
        // Behind a large chunk probably comes another one, of which only the header is wanted here: the rest would be copied.
        size_t more = std::min(into < kSmall ? kAhead : sizeof(Header), kAhead - c.ahead_end);
        iovec pieces[2] = {{c.into ? c.into : scratch_.data(), into}, {c.ahead.data() + c.ahead_end, more}};
        bool beyond = into == c.left;
        size_t asked = into + (beyond ? more : 0);
        ssize_t got = c.receive(into ? pieces : pieces + 1, into && beyond ? 2 : 1, turn < kTurns);
        if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return drop(c, got == 0 ? Event::kEnded : errno == ECONNRESET ? Event::kReset : Event::kLost);
        size_t count = static_cast<size_t>(got), direct = std::min(count, into);
        c.taken += direct;
        c.left -= direct;
        if (c.into) c.into += direct;
        if (direct) {
            hear(c);
            if (c.left == 0) end(c);
        }
        c.ahead_end += count - direct;
        if (c.ahead_end > c.ahead_begin) parse(c);
        if (count < asked) break;
    }
    if (c.is_dead) return;
    if (c.session && c.session->is_broken()) return drop(c);
    if (c.taken - c.told >= (c.peer->is_long() ? kAckFar : kAckNear)) {
        acknowledge(c);
    }
}

void Engine::parse(Connection& c) {
    while (!c.is_dead && !c.is_paused) {
        size_t have = c.ahead_end - c.ahead_begin;
        if (c.left) {
            size_t count = std::min(have, c.left);
            if (count == 0) break;
            if (c.into) std::memcpy(c.into, c.ahead.data() + c.ahead_begin, count), c.into += count;
            c.ahead_begin += count;
            c.taken += count;
            c.left -= count;
            hear(c);
            if (c.left == 0) end(c);
            continue;
        }
        if (have < sizeof(Header)) break;
        std::memcpy(&c.header, c.ahead.data() + c.ahead_begin, sizeof(Header));
        if (!begin(c)) break;
        c.ahead_begin += sizeof(Header);
        c.taken += sizeof(Header);
    }
    if (c.ahead_begin == c.ahead_end) c.ahead_begin = c.ahead_end = 0;
    else if (c.ahead_begin > 0 && kAhead - c.ahead_end < kAhead / 2) {
        std::memmove(c.ahead.data(), c.ahead.data() + c.ahead_begin, c.ahead_end - c.ahead_begin);
        c.ahead_end -= c.ahead_begin, c.ahead_begin = 0;
    }
}

// A header has come. False: it is not taken now, because its message is not expected yet and too much has come early.
bool Engine::begin(Connection& c) {
    Peer& peer = *c.peer;
    const Header& h = c.header;
    if (std::string wrong = check(h); !wrong.empty()) return leave(c, wrong), false;
    if (is_channel_) peer.heard = now();
    if (h.kind == kAck) {
        if (h.number > c.written || h.total > peer.sent) return leave(c, "acknowledged what was never sent"), false;
        acknowledged(c, h.number);
        peer.taken = std::max(peer.taken, h.total);
        if (auto held = peer.held.find(h.offset - 1); held != peer.held.end()) held->second = true;
    } else if (h.kind == kAsk && h.number > 0) {
        if (!answer(c, h.number - 1)) return false;
    } else if (h.kind == kAsk) {
        if (++c.asks > kMaxAsks) return leave(c, "asks for too many acknowledgements"), false;
        c.told = c.taken + sizeof(Header);
        control(c, kAck, c.told);
        flush(c, true);
    } else if (h.kind == kWant) {
        Event event{Event::kWant, peer.rank, static_cast<int>(std::min<uint64_t>(h.number, kMaxStripes + 1))};
        auto same = [&](const Event& other) { return other.what == event.what && other.peer == event.peer; };
        auto waiting = std::find_if(events_.begin(), events_.end(), same);  // so that their number is bounded
        if (waiting == events_.end()) events_.push_back(event);
        else waiting->number = std::max(waiting->number, event.number);
        events_ready_.notify_all();
    } else if (h.kind == kBye || h.kind == kFail) {
        peer.has_said_goodbye = h.kind == kBye;
        leave(c, h.kind == kFail ? "has failed: it lost rank " + std::to_string(h.number)
                 : is_channel_   ? "has hung up"
                                 : "has closed its communicator");
        return false;
    }
    if (h.kind != kData) return true;
    c.message = nullptr, c.into = nullptr;
    const Whole& seen = peer.seen(h.number);
    uint64_t index = h.number & kInStream;
    if (seen.has(index)) {
        ++peer.counts.duplicates;
        c.left = h.length;
        return true;
    }
    auto found = peer.incoming.find(h.number);
    bool is_far = found == peer.incoming.end() && peer.incoming.size() >= peer.expected.size() + kMaxAhead;
    if (is_far || h.number >= kNumbers || index > seen.below + kMaxAhead)
        return leave(c, "is too many messages ahead"), false;
    bool has_memory = found != peer.incoming.end() && (found->second.data || found->second.ranges.count(h.offset));
    if (!has_memory && peer.early + kCost + h.length > early_bytes_) return c.is_paused = true, false;
    Incoming& message = found != peer.incoming.end() ? found->second : peer.incoming[h.number];
    if (message.total == 0) message.total = message.left = h.total;
    if (message.total != h.total)
        return lose_one(peer, peer.mismatch(h.total, message.total)), false;
    Incoming::Range* range = message.range(h);
    if (!range) return leave(c, "sent chunks that overlap"), false;
    c.left = h.length;
    if (range->is_done) {
        ++peer.counts.duplicates;
        return true;
    }
    if (!message.data && !range->early) {
        range->early = copies_.take(h.length);
        peer.early += kCost + h.length;
    }
    c.message = &message;
    c.range = range;
    c.into = range->early ? range->early.get() : message.data + h.offset;
    return true;
}

// The peer asks whether a message is expected. If it is not, the answer comes later.
bool Engine::answer(Connection& c, uint64_t number) {
    Peer& peer = *c.peer;
    const Whole& seen = peer.seen(number);
    const uint64_t index = number & kInStream;
    const bool is_far = number >= kNumbers || index > seen.below + kMaxAhead || peer.asked.size() >= kMaxAhead;
    if (is_far) return leave(c, "is too many messages ahead"), false;
    if (peer.expected.count(number) == 0) {
        if (!seen.has(index)) peer.asked.insert(number);
        return true;
    }
    if (++peer.incoming.at(number).asks > kMaxAsks) return leave(c, "asks for too many acknowledgements"), false;
    acknowledge(c, number + 1);
    return true;
}

// Part of a chunk has come. What came before over another connection is no progress: where large packets are lost on the way,
// each new connection brings the same first bytes, and no more.
void Engine::hear(Connection& c) {
    uint32_t reached = c.header.length - static_cast<uint32_t>(c.left);
    if (!c.message || reached <= c.range->reached) return;
    c.range->reached = reached;
    c.peer->heard = now();
}

// A chunk is whole.
void Engine::end(Connection& c) {
    Incoming* message = std::exchange(c.message, nullptr);
    c.into = nullptr;
    if (!message) return;
    Peer& peer = *c.peer;
    Incoming::Range& range = message->ranges.at(c.header.offset);
    if (range.is_done) {
        ++peer.counts.duplicates;
        return;
    }
    range.is_done = true;
    // On a channel, small messages are between large ones: kept until many are acknowledged, they would split up memory.
    if (is_channel_ && c.header.offset + c.header.length == c.header.total) acknowledge(c);
    // Others may be in the middle of the same chunk, and in the memory that goes now.
    for (auto& other : peer.connections)
        if (other->message == message && other->header.offset == c.header.offset) other->message = nullptr, other->into = nullptr;
    if (!message->data) return;
    if (range.early) {
        std::memcpy(message->data + c.header.offset, range.early.get(), range.length);
        range.early.reset();
        peer.early -= kCost + range.length;
    }
    peer.placed += kCost + range.length;
    message->left -= range.length;
    if (message->left == 0) finish_message(peer, c.header.number);
}

void Engine::finish_message(Peer& peer, uint64_t number) {
    peer.incoming.erase(number);
    auto op = peer.expected.at(number);
    peer.expected.erase(number);
    peer.whole[number >> kStreamShift].add(number & kInStream);
    if (--op->left == 0) release(op);
}

}  // namespace thinwire::wire
