// What the engine keeps of each operation, chunk, connection and peer.
#pragma once

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "engine.hpp"

namespace thinwire::wire {

constexpr size_t kAhead = 1 << 15;          // bytes read beyond the chunk that is being read
constexpr uint64_t kSmall = 1 << 14;        // messages below go first
constexpr double kLong = 0.003;             // round trip from which a line is a long one
constexpr double kFar = 0.015;              // and a very long one, where a window of ten packets is the rule after a pause
constexpr uint32_t kLongChunk = 1 << 16;
constexpr uint32_t kFarChunk = 14 * 1024;   // ten packets, which leave at once
constexpr uint64_t kLight = 4 << 20;        // so many bytes or fewer go over the one connection that endures lost packets
constexpr int kMaxStripes = 64;
constexpr double kPatience = 10;            // seconds in which nothing arrives, until a connection is given up
constexpr int kHold = 1 << 14, kHoldDeep = 1 << 17, kHoldNear = 1 << 20;  // bytes beyond the window

inline double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Engine::Operation {
    uint64_t id = 0;
    size_t left = 0;     // chunks to write and messages to receive, until it is done
    size_t unacked = 0;  // chunks that may have to be sent again from its memory
    bool is_done = false, is_settled = false;
    bool is_hedged = false;  // some chunk is on several connections
    std::string error;
    std::vector<int> peers;
    std::condition_variable done;
};

struct Engine::Chunk {
    Header header{};
    const uint8_t* data = nullptr;
    Copies::Bytes kept;  // a copy, once the operation has given its memory back
    std::shared_ptr<Operation> op;
    bool is_written = false, is_acked = false;
    int copies = 1;
    double sent_at = 0;
};

struct Engine::Connection {
    struct Frame {
        Header header;
        std::shared_ptr<Chunk> chunk;  // null for control frames
        uint64_t end;                  // where it ends in the connection's bytes
    };
    Peer* peer = nullptr;
    int fd = -1;
    std::shared_ptr<Session> session;  // null: bytes go over the line as they are
    bool is_dead = false, is_blocked = false, is_paused = false, ends = false;
    bool is_steady = false;  // BBR, which does not slow down at each lost packet, but is disturbed by others of its kind
    // sending
    std::deque<Frame> frames;  // those that are not acknowledged
    size_t unwritten = 0;      // index of the first that is not written whole
    size_t part = 0;           // bytes of that one that are written
    uint64_t pushed = 0, written = 0;
    uint64_t asked = 0;  // up to where it has asked for an acknowledgement
    int64_t delivered = 0;
    double progressed = 0;  // when packets were last delivered, or none were on their way
    // receiving
    std::vector<uint8_t> ahead = std::vector<uint8_t>(kAhead);
    size_t ahead_begin = 0, ahead_end = 0;
    Header header{};
    Incoming* message = nullptr;  // null: the bytes are dropped
    Incoming::Range* range = nullptr;  // of the message, while there is one
    uint8_t* into = nullptr;
    size_t left = 0;  // of the chunk
    uint64_t taken = 0, told = 0;
    int asks = 0;

    uint64_t unacknowledged() const {
        return frames.empty() ? 0 : pushed - frames.front().end + sizeof(Header) + frames.front().header.length;
    }
    uint64_t sealed() const { return session ? session->pending() : 0; }  // written, and not with the kernel yet

    ssize_t send(iovec* pieces, int count) {
        if (session) return session->send(pieces, count);
        msghdr message{};
        message.msg_iov = pieces;
        message.msg_iovlen = static_cast<decltype(message.msg_iovlen)>(count);
        return sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    }

    ssize_t receive(iovec* pieces, int count, bool from_socket) {
        if (session) return session->receive(pieces, count, from_socket);
        msghdr message{};
        message.msg_iov = pieces;
        message.msg_iovlen = static_cast<decltype(message.msg_iovlen)>(count);
        return recvmsg(fd, &message, MSG_DONTWAIT);
    }
};

struct Engine::Peer {
    struct Outgoing {
        Part part;
        uint64_t next, chunk;  // bytes: where the next chunk begins, and of each
        std::shared_ptr<Operation> op;
    };
    int rank = 0;
    std::vector<std::unique_ptr<Connection>> connections;  // the oldest one is for small messages, if there are several
    std::deque<std::shared_ptr<Chunk>> small, again;
    std::deque<Outgoing> bulk;
    std::map<uint64_t, Incoming> incoming;  // by number
    std::map<uint64_t, std::shared_ptr<Operation>> expected;
    std::map<uint64_t, Whole> whole;  // by stream; only those from which this worker has expected something
    uint64_t early = 0;               // bytes
    std::set<uint64_t> asked;         // messages about which the peer has asked, and that are not expected yet
    uint64_t placed = 0;              // cost of all chunks that have come for expected messages
    std::map<uint64_t, bool> held;    // messages about which this worker has asked: whether the peer expects them
    uint64_t sent = 0, taken = 0;     // cost of all chunks that were sent, and of those that the peer has placed
    double heard = 0, moved = 0;      // when the last new payload came (on a channel, anything), and left
    double next_sign = 0;             // of life
    double round_trip = 1e9, backlog = 0, looked = 0, next_look = 0, next_watch = 0;
    size_t turn = 0;
    bool is_deep = false, is_mine = false;  // this worker makes the connections
    bool is_heavy = false;                  // more than `kLight` has waited, and some of it does still
    bool is_held = false;                   // all of `bulk` waits until the peer expects it
    std::string gone;
    bool has_said_goodbye = false;
    Counts counts;

    bool is_long() const { return round_trip > kLong && round_trip < 1e8; }
    uint64_t chunk_bytes() const { return !is_long() ? kNearChunk : round_trip > kFar ? kFarChunk : kLongChunk; }
    bool has_work() const { return !(small.empty() && again.empty() && bulk.empty()); }
    // Whether large messages have living connections of this kind.
    bool has(bool steady) const {
        return connections.size() > 1 && std::any_of(connections.begin() + 1, connections.end(), [&](auto& c) {
                   return c->is_steady == steady && !c->is_dead;
               });
    }
    bool is_light() const { return !is_heavy && has(true); }
    // Whether something has not been sent whole; what is acknowledged over another connection has.
    bool has_unsent() const {
        auto is_unsent = [](const Connection::Frame& frame) { return frame.chunk && !frame.chunk->is_written; };
        return has_work() || std::any_of(connections.begin(), connections.end(), [&](auto& c) {
                   return !c->is_dead && std::any_of(c->frames.begin() + static_cast<long>(c->unwritten), c->frames.end(), is_unsent);
               });
    }
    uint64_t left_of_bulk() const {
        uint64_t left = 0;
        for (const Outgoing& out : bulk) left += out.part.bytes - out.next;
        return left;
    }
    std::string mismatch(uint64_t got, uint64_t expected) const {
        return "rank " + std::to_string(rank) + " sent a message of " + std::to_string(got) + " bytes, expected " +
               std::to_string(expected) + "; do all workers run the same version and configuration, for as many steps?";
    }
    const Whole& seen(uint64_t number) const {
        static const Whole none;
        auto found = whole.find(number >> kStreamShift);
        return found == whole.end() ? none : found->second;
    }
};

}  // namespace thinwire::wire
