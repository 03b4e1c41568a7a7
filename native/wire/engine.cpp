#include "engine.hpp"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <system_error>
#include <utility>

#ifdef __linux__
#include <linux/sockios.h>
#endif

namespace thinwire::wire {

namespace {

constexpr size_t kAhead = 1 << 15;          // bytes read beyond the chunk that is being read
constexpr uint64_t kSmall = 1 << 14;        // messages below go first
constexpr double kLong = 0.003;             // round trip from which a line is a long one
constexpr double kFar = 0.015;              // and a very long one, where a window of ten packets is the rule after a pause
constexpr double kSlow = 0.06;              // and one on which repairing a lost packet takes long
constexpr uint32_t kLongChunk = 1 << 16;
constexpr uint32_t kFarChunk = 14 * 1024;   // ten packets, which leave at once
constexpr uint64_t kDeep = 8 << 20;         // with so many bytes left, connections hold more of them, against starving
constexpr uint64_t kLight = 4 << 20;        // so many bytes or fewer go over the one connection that endures lost packets
constexpr int kHold = 1 << 14, kHoldDeep = 1 << 17, kHoldNear = 1 << 20;  // bytes beyond the window
constexpr uint64_t kAckNear = 1 << 19, kAckFar = 1 << 17;
constexpr int kSigns = 4;                   // of life, in the time limit, so that a late one does no harm
constexpr int kTurns = 8;                   // of reading from one connection before the others
constexpr int kMaxStripes = 64;
constexpr int kMaxCopies = 3;               // of a chunk that is late
constexpr uint64_t kWindow = 128 << 20;     // bytes that a peer may leave unacknowledged: copies of them are kept
constexpr int kMaxAsks = 1024;              // for an acknowledgement, over one connection
constexpr double kPatience = 10;            // seconds in which nothing arrives, until a connection is given up
constexpr double kMostIdle = 70;            // seconds without an answer, until an idle one is; longer than most queues
constexpr double kLook = 1;                 // seconds between two looks at what arrives

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

auto after(double seconds) { return std::chrono::steady_clock::now() + std::chrono::microseconds(static_cast<int64_t>(1e6 * seconds)); }

// What the kernel knows of a connection. The layout is that of linux/tcp.h, which the C library's header lacks in part.
struct Info {
    double round_trip = 0, variation = 0, least_round_trip = 0;
    uint32_t packet = 1448;
    int64_t room = 1 << 20;  // packets that may leave now
    uint64_t unacked = 0;    // bytes that the other kernel does not have
    int64_t on_the_way = 0;  // packets that have left, and that it has not acknowledged
    int64_t delivered = -1;  // packets that it has, in any order; -1: unknown
};

Info info_of(int fd) {
    Info info;
#ifdef __linux__
    alignas(8) uint8_t raw[256] = {};
    socklen_t size = sizeof raw;
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, raw, &size) == 0 && size >= 152) {
        auto at = [&](size_t place) {
            uint32_t value;
            std::memcpy(&value, raw + place, 4);
            return static_cast<int64_t>(value);
        };
        info.round_trip = 1e-6 * static_cast<double>(at(68));
        info.variation = 1e-6 * static_cast<double>(at(72));
        info.least_round_trip = 1e-6 * static_cast<double>(at(148));
        info.packet = static_cast<uint32_t>(std::max<int64_t>(at(16), 1));
        info.on_the_way = at(24);
        int64_t in_flight = info.on_the_way - at(28) - at(32) + at(36), unsent = (at(144) + info.packet - 1) / info.packet;
        info.room = at(80) - in_flight - unsent;
        if (size >= 196) info.delivered = at(192);
    }
    int waiting = 0;
    if (ioctl(fd, SIOCOUTQ, &waiting) == 0) info.unacked = static_cast<uint64_t>(waiting);
#else
    (void)fd;
#endif
    return info;
}

void set(int fd, int level, int option, int value) {
    setsockopt(fd, level, option, &value, sizeof value);  // what a system does not have, it does without
}

// Chooses a connection's congestion control; false if the system has not got it, or does not allow it.
bool choose(int fd, const char* name) {
#ifdef TCP_CONGESTION
    return setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, static_cast<socklen_t>(std::strlen(name))) == 0;
#else
    (void)fd, (void)name;
    return false;
#endif
}

std::string mismatch(int rank, uint64_t got, uint64_t expected) {
    return "rank " + std::to_string(rank) + " sent a message of " + std::to_string(got) + " bytes, expected " +
           std::to_string(expected) + "; do all workers run the same version and configuration, for as many steps?";
}

}  // namespace

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
    const Whole& seen(uint64_t number) const {
        static const Whole none;
        auto found = whole.find(number >> kStreamShift);
        return found == whole.end() ? none : found->second;
    }
};

Engine::Engine(int rank, int size, double timeout_seconds, bool is_channel, uint64_t early_bytes)
    : rank_(rank), timeout_(timeout_seconds), is_channel_(is_channel), early_bytes_(early_bytes), process_(getpid()),
      peers_(static_cast<size_t>(size)), scratch_(1 << 16) {
    if (pipe(wake_) != 0) throw std::runtime_error(std::string("no pipe for the engine: ") + std::strerror(errno));
    for (int end : wake_) fcntl(end, F_SETFL, O_NONBLOCK), fcntl(end, F_SETFD, FD_CLOEXEC);
    for (int i = 0; i < size; ++i) peers_[static_cast<size_t>(i)].rank = i, peers_[static_cast<size_t>(i)].is_mine = i < rank;
    sigset_t all, before;  // signals are for the threads of Python
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    std::string trouble;
    try {
        thread_ = std::thread([this] { run(); });
    } catch (const std::system_error& error) {
        trouble = error.what();
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (trouble.empty()) return;
    ::close(wake_[0]), ::close(wake_[1]);
    throw std::runtime_error("no thread for the engine: " + trouble);
}

Engine::~Engine() {
    if (getpid() != process_) {  // a fork: the thread is the parent's
        if (thread_.joinable()) thread_.detach();
        return;
    }
    end_thread();
    for (Peer& peer : peers_)
        for (auto& c : peer.connections)
            if (!c->is_dead) ::close(c->fd);
}

void Engine::end_thread() {
    {
        Lock lock(mutex_);
        stop_ = true;
        wake();
    }
    if (!thread_.joinable()) return;
    thread_.join();
    ::close(wake_[0]), ::close(wake_[1]);
}

void Engine::wake() {
    if (polling_ && ::write(wake_[1], "", 1) < 0) return;  // a full pipe wakes as well
}

// ---- what other threads call ----

void Engine::attach(int rank, int fd, std::shared_ptr<Session> session) {
    Lock lock(mutex_);
    Peer& peer = peers_.at(static_cast<size_t>(rank));
    if (!failure_.empty() || !peer.gone.empty() || stop_) {
        ::close(fd);
        return;
    }
    fcntl(fd, F_SETFL, O_NONBLOCK);
    set(fd, IPPROTO_TCP, TCP_NODELAY, 1);
    Info info = info_of(fd);
    double least = info.least_round_trip > 0 ? std::min(info.least_round_trip, info.round_trip) : info.round_trip;
    if (least > 0) peer.round_trip = std::min(peer.round_trip, least);
    // While nothing is sent, probes find out that the line is dead, or that the peer has given up the connection.
    set(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
#ifdef __linux__
    set(fd, IPPROTO_TCP, TCP_KEEPIDLE, static_cast<int>(kPatience));
    set(fd, IPPROTO_TCP, TCP_KEEPINTVL, 2);
    set(fd, IPPROTO_TCP, TCP_KEEPCNT, std::max(3, static_cast<int>(std::min(timeout_ / 2, kMostIdle) - kPatience) / 2));
#endif
#ifdef SO_MAX_PACING_RATE
    // Any limit makes TCP spread a window over the round trip, at its own rate; a burst would overflow the line's queue.
    if (peer.is_long()) set(fd, SOL_SOCKET, SO_MAX_PACING_RATE, 1 << 30);
#endif
    auto c = std::make_unique<Connection>();
    if (peer.is_long()) c->is_steady = peer.has(false) && !peer.has(true) && peer.round_trip > kSlow && choose(fd, "bbr");
    if (peer.is_long() && !c->is_steady && !choose(fd, "cubic")) choose(fd, "reno");
#ifdef TCP_NOTSENT_LOWAT
    set(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, peer.is_long() && !c->is_steady ? kHold : kHoldNear);
#endif
    c->peer = &peer, c->fd = fd, c->session = std::move(session), c->progressed = now();
    peer.connections.push_back(std::move(c));
    ++peer.counts.connections;
    pump(peer);
    Connection& made = *peer.connections.back();
    if (made.session && !made.is_dead) read(made);  // what came together with the end of the greeting
    wake();
}

uint64_t Engine::post(const std::vector<Part>& sends, const std::vector<Part>& receives) {
    Lock lock(mutex_);
    if (is_channel_)
        for (auto* parts : {&sends, &receives})
            for (const Part& part : *parts)
                if (part.peer != (sends.empty() ? receives : sends).front().peer)
                    throw std::runtime_error("an operation of a channel is with one peer");
    auto op = std::make_shared<Operation>();
    op->id = next_operation_++;
    op->left = sends.size() + receives.size() + 1;  // one more until all is posted
    operations_[op->id] = op;
    if (!failure_.empty()) {
        op->error = failure_;
        op->is_done = op->is_settled = true;
        finished_.push_back(op->id);
        return op->id;
    }
    double at = now();
    for (const Part& part : receives) {
        Peer& peer = peers_.at(static_cast<size_t>(part.peer));
        op->peers.push_back(part.peer);
        Incoming& message = peer.incoming[part.number];
        if (peer.expected.empty()) peer.heard = at;
        peer.expected[part.number] = op;
        if (!message.ranges.empty() && message.total != part.bytes) {
            peer.gone = mismatch(peer.rank, message.total, part.bytes);
            continue;
        }
        message.total = message.left = part.bytes;
        message.data = part.data;
        for (auto& [offset, range] : message.ranges) {
            if (!range.early || !range.is_done) continue;
            std::memcpy(part.data + offset, range.early.get(), range.length);
            range.early.reset();
            peer.early -= kCost + range.length;
            peer.placed += kCost + range.length;
            message.left -= range.length;
        }
        if (message.left == 0) finish_message(peer, part.number);
        auto living = std::find_if(peer.connections.begin(), peer.connections.end(), [](auto& c) { return !c->is_dead; });
        if (peer.asked.erase(part.number) && living != peer.connections.end()) acknowledge(**living, part.number + 1);
        for (auto& c : peer.connections) {
            if (!c->is_paused || c->is_dead) continue;
            c->is_paused = false;
            wake();
            parse(*c);
            read(*c);
            if (!failure_.empty()) return op->id;
        }
    }
    for (const Part& part : sends) {
        Peer& peer = peers_.at(static_cast<size_t>(part.peer));
        op->peers.push_back(part.peer);
        if (part.bytes == 0) {  // the receiver knows
            --op->left;
            continue;
        }
        if (!peer.has_unsent()) peer.moved = at;
        if (part.bytes < kSmall) {
            auto chunk = std::make_shared<Chunk>();
            chunk->header = {kData, static_cast<uint32_t>(part.bytes), part.number, part.bytes, 0};
            chunk->data = part.data;
            chunk->op = op;
            ++op->unacked;
            peer.small.push_back(std::move(chunk));
        } else {
            uint64_t chunk = peer.chunk_bytes();
            peer.bulk.push_back({part, 0, chunk, op});
            op->left += (part.bytes - 1) / chunk;  // chunks, not messages
            op->unacked += (part.bytes - 1) / chunk + 1;
        }
    }
    for (const Part& part : sends) {
        Peer& peer = peers_[static_cast<size_t>(part.peer)];
        peer.is_heavy = peer.is_heavy || peer.left_of_bulk() > kLight;
        pump(peer);
        if (peer.is_long()) wake();  // for the time of the next look
    }
    for (int rank : op->peers) check_gone(peers_[static_cast<size_t>(rank)]);
    if (--op->left == 0) release(op);
    return op->id;
}

bool Engine::wait(uint64_t id, double seconds) {
    Lock lock(mutex_);
    auto found = operations_.find(id);
    if (found == operations_.end()) return true;
    auto op = found->second;
    if (!op->done.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return op->is_done; })) return false;
    operations_.erase(id);
    settle(op);
    if (!op->error.empty()) throw std::runtime_error(op->error);
    return true;
}

int Engine::begun(const std::vector<std::pair<int, uint64_t>>& messages, double seconds) {
    Lock lock(mutex_);
    int found = -1;
    size_t left = 0;
    auto look = [&] {
        left = messages.size();
        for (size_t i = 0; i < messages.size() && failure_.empty(); ++i) {
            Peer& peer = peers_.at(static_cast<size_t>(messages[i].first));
            const uint64_t number = messages[i].second;
            if (peer.incoming.count(number) || peer.asked.count(number)) return found = static_cast<int>(i), true;
            if (peer.gone.empty()) continue;
            if (!peer.has_said_goodbye || --left == 0) fail(peer, peer.gone);
        }
        return !failure_.empty();
    };
    flushed_.wait_for(lock, std::chrono::duration<double>(seconds), look);
    if (found < 0 && !failure_.empty()) throw std::runtime_error(failure_);
    return found;
}

int Engine::first(const std::vector<uint64_t>& operations, double seconds) {
    Lock lock(mutex_);
    int found = -1;
    flushed_.wait_for(lock, std::chrono::duration<double>(seconds), [&] {
        for (size_t i = 0; i < operations.size(); ++i) {
            auto op = operations_.find(operations[i]);
            if (op == operations_.end() || op->second->is_done) return found = static_cast<int>(i), true;
        }
        if (std::exchange(is_interrupted_, false)) return found = -2, true;
        return false;
    });
    return found;
}

void Engine::interrupt() {
    Lock lock(mutex_);
    is_interrupted_ = true;
    flushed_.notify_all();
}

std::vector<uint64_t> Engine::finished() {
    Lock lock(mutex_);
    return std::exchange(finished_, {});
}

std::vector<Event> Engine::events(double seconds) {
    Lock lock(mutex_);
    events_ready_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return !events_.empty(); });
    std::vector<Event> all(events_.begin(), events_.end());
    events_.clear();
    return all;
}

void Engine::cut() {
    Lock lock(mutex_);
    for (Peer& peer : peers_)
        for (auto& c : peer.connections) drop(*c);
}

void Engine::connects(int rank, bool is_mine) {
    Lock lock(mutex_);
    peers_.at(static_cast<size_t>(rank)).is_mine = is_mine;
}

void Engine::lose(int rank, const std::string& reason) {
    Lock lock(mutex_);
    lose_one(peers_.at(static_cast<size_t>(rank)), reason);
    flushed_.notify_all();
    wake();
}

bool Engine::drained(double seconds) {
    Lock lock(mutex_);
    return flushed_.wait_until(lock, after(seconds), [&] {
        bool is_drained = true;
        for (Peer& peer : peers_) {
            if (!failure_.empty() || !peer.gone.empty()) continue;
            is_drained = is_drained && !peer.has_work();
            for (auto& c : peer.connections) {
                if (c->is_dead) continue;
                uint64_t last = 0;  // of two that close at the same time, none acknowledges the other's last answer
                for (auto& frame : c->frames)
                    if (frame.chunk) last = frame.end;
                is_drained = is_drained && last == 0;
                if (last > c->asked && last <= c->written) {
                    control(*c, kAsk, 0);
                    c->asked = c->pushed;
                    wake();
                }
            }
        }
        return is_drained;
    });
}

void Engine::close(double seconds) {
    drained(seconds);
    Lock lock(mutex_);
    closing_ = true;
    for (Peer& peer : peers_)
        for (auto& c : peer.connections)
            if (!c->is_dead) control(*c, kBye, 0), c->ends = true, flush(*c, true);
    wake();
    flushed_.wait_until(lock, after(std::min(seconds, 2.0)), [&] {
        for (Peer& peer : peers_)
            for (auto& c : peer.connections)
                if (!c->is_dead) return false;
        return true;
    });
    if (failure_.empty()) failure_ = is_channel_ ? "the channel was closed" : "the communicator was closed";
    end_operations(failure_);  // other threads may wait for some
    for (Peer& peer : peers_)
        for (auto& c : peer.connections) drop(*c);
    events_.push_back({Event::kFailed, -1, 0});
    events_ready_.notify_all();
    lock.unlock();
    end_thread();
}

Counts Engine::counts(int rank) {
    Lock lock(mutex_);
    Peer& peer = peers_.at(static_cast<size_t>(rank));
    peer.counts.round_trip_seconds = peer.round_trip < 1e8 ? peer.round_trip : 0;
    return peer.counts;
}

// ---- the thread ----

void Engine::run() {
#ifdef __linux__
    pthread_setname_np(pthread_self(), "thinwire-engine");  // for accounts of processor time by thread
#endif
    std::vector<pollfd> polls;
    std::vector<Connection*> polled;
    Lock lock(mutex_);
    while (!stop_) {
        do {
            died_ = false;
            sweep();
            for (Peer& peer : peers_) pump(peer);
        } while (died_);
        double pause = tick(now());
        polls.assign(1, {wake_[0], POLLIN, 0});
        polled.assign(1, nullptr);
        for (Peer& peer : peers_)
            for (auto& c : peer.connections) {
                if (c->is_dead) continue;
                short events = static_cast<short>((c->is_paused ? 0 : POLLIN) | (c->is_blocked ? POLLOUT : 0));
                polls.push_back({c->fd, events, 0});
                polled.push_back(c.get());
            }
        polling_ = true;
        lock.unlock();
        poll(polls.data(), static_cast<nfds_t>(polls.size()), static_cast<int>(1000 * pause) + 1);
        lock.lock();
        polling_ = false;
        if (polls[0].revents) {
            char bytes[64];
            while (::read(wake_[0], bytes, sizeof bytes) == sizeof bytes) {}
        }
        for (size_t i = 1; i < polls.size(); ++i) {
            Connection& c = *polled[i];
            if (!polls[i].revents || c.is_dead) continue;
            if (polls[i].revents & POLLOUT) c.is_blocked = false;
            const bool has_ended = polls[i].revents & (POLLHUP | POLLERR);
            if (c.is_paused && has_ended) drop(c);  // what is unread comes again
            else if (has_ended || polls[i].revents & POLLIN) read(c);
        }
        flushed_.notify_all();
    }
}

std::string Engine::limit_text() const {
    char text[40];
    std::snprintf(text, sizeof text, "%g seconds", timeout_);
    return text;
}

// Looks after time limits, stripes and late chunks; returns after how many seconds to do so again.
double Engine::tick(double at) {
    double pause = std::min(1.0, timeout_ / 8);
    if (!failure_.empty()) return pause;
    Peer* silent = nullptr;  // the longest: the others may wait for it too
    for (Peer& peer : peers_)
        if (peer.gone.empty() && !peer.expected.empty() && (!silent || peer.heard < silent->heard)) silent = &peer;
    if (silent) {
        // A peer whose connections live may itself wait for one whose connections do not, and says so when its time is up.
        double left = silent->heard + timeout_ * (silent->counts.connections ? 1.125 : 1.0) - at;
        if (left <= 0) {
            fail(*silent, "nothing came from rank " + std::to_string(silent->rank) + " in " + limit_text());
            return 0;
        }
        pause = std::min(pause, left);
    }
    for (Peer& peer : peers_) {
        if (!peer.gone.empty()) continue;
        if (at - peer.moved > timeout_ && peer.has_unsent()) {
            fail(peer, "nothing could be sent to rank " + std::to_string(peer.rank) + " in " + limit_text());
            return 0;
        }
        if (is_channel_ && at >= peer.next_sign && !peer.connections.empty() && !peer.connections.front()->is_dead) {
            peer.next_sign = at + timeout_ / kSigns;
            acknowledge(*peer.connections.front());
        }
        if (at >= peer.next_watch) {
            watch_silent(peer, at);
            peer.next_watch = at + kLook;
            if (died_) return 0;
        }
        if (!peer.is_long()) continue;
        double look = std::clamp(peer.round_trip / 16, 0.002, 0.010);
        bool is_busy = peer.has_work();
        for (auto& c : peer.connections) is_busy = is_busy || c->frames.size() > 0;
        if (!is_busy) continue;
        if (peer.is_light() && peer.has_work() && at - peer.moved > 3 * peer.round_trip) {
            peer.is_heavy = true;  // the one connection is stuck, so the others take over
            pump(peer);
        }
        if (at >= peer.next_look) {
            watch_stripes(peer, at);
            hedge(peer, at);
            peer.next_look = at + look;
        }
        pause = std::min(pause, look);
    }
    return pause;
}

// Gives up connections on which nothing arrives any more: TCP itself waits twice as long each time. Its TCP_USER_TIMEOUT counts
// from the first loss, whatever has arrived since, so it would take a long queue for a dead line. A longer queue makes round
// trips longer, and those of all connections with the peer tell. While a peer does not read, nothing is on its way.
void Engine::watch_silent(Peer& peer, double at) {
    std::vector<Info> infos;
    double slowest = 0;
    for (auto& c : peer.connections) {
        infos.push_back(c->is_dead ? Info() : info_of(c->fd));
        slowest = std::max(slowest, infos.back().round_trip);
    }
    double least = peer.round_trip < 1e8 ? peer.round_trip : 0;
    double patience = std::max({kPatience, 40 * least, std::min(4 * slowest, timeout_ / 2)});
    for (size_t i = 0; i < infos.size(); ++i) {
        Connection& c = *peer.connections[i];
        const Info& info = infos[i];
        if (c.is_dead || info.delivered < 0) continue;
        if (info.on_the_way == 0 || info.delivered != c.delivered) {
            c.delivered = info.delivered;
            c.progressed = at;
        } else if (at - c.progressed > patience) {
            linger none{1, 0};  // what waits in the kernel goes over other connections
            setsockopt(c.fd, SOL_SOCKET, SO_LINGER, &none, sizeof none);
            drop(c);
        }
    }
}

// Asks for more connections if work has waited for several round trips while the line had no queue, so was not full. Not if
// the peer has yet to expect it: more connections would not help.
void Engine::watch_stripes(Peer& peer, double at) {
    if (!peer.bulk.empty() && !peer.is_held && !peer.is_light())
        peer.backlog += std::min(at - peer.looked, 0.02);  // over several messages, and not in between
    peer.looked = at;
    if (peer.backlog < 4 * peer.round_trip || peer.counts.connections > kMaxStripes) return;
    std::vector<double> trips;
    for (auto& c : peer.connections) {
        if (c->is_dead || c->frames.empty()) continue;
        Info info = info_of(c->fd);
        if (info.least_round_trip > 0) peer.round_trip = std::min(peer.round_trip, info.least_round_trip);
        trips.push_back(info.round_trip);
    }
    peer.backlog = 0;
    if (trips.empty()) return;
    std::nth_element(trips.begin(), trips.begin() + static_cast<long>(trips.size() / 2), trips.end());
    if (trips[trips.size() / 2] > 1.25 * peer.round_trip + 0.001) return;
    int wanted = std::min(kMaxStripes + 1, 2 * peer.counts.connections);
    if (wanted <= peer.counts.connections || peer.connections.empty()) return;
    if (peer.is_mine) {
        events_.push_back({Event::kWant, peer.rank, wanted});
        events_ready_.notify_all();
    } else {
        control(*peer.connections.front(), kWant, static_cast<uint64_t>(wanted));
    }
}

// Sends what is late once more over a connection that has room: a lost packet costs TCP a round trip or more.
void Engine::hedge(Peer& peer, double at) {
    if (peer.has_work() || peer.connections.size() < 3) return;
    std::vector<std::shared_ptr<Chunk>> late;
    std::vector<Connection*> idle;
    for (auto& c : peer.connections) {
        if (c->is_dead) continue;
        Info info = info_of(c->fd);
        if (info.unacked == 0 && !c->is_blocked) {
            if (info.room >= 10) idle.push_back(c.get());
            continue;
        }
        uint64_t arrived = c->written - std::min(c->written, info.unacked + c->sealed());
        double limit = 1.25 * info.round_trip + 2 * info.variation + 0.005;
        for (size_t i = 0; i < c->frames.size(); ++i) {
            auto& frame = c->frames[i];
            if (!frame.chunk || frame.end <= arrived || frame.chunk->is_acked) continue;
            if (frame.chunk->copies < kMaxCopies && at - frame.chunk->sent_at > limit) late.push_back(frame.chunk);
        }
    }
    for (size_t i = 0; i < late.size() && i < idle.size(); ++i) {
        ++late[i]->copies;
        late[i]->op->is_hedged = true;
        ++peer.counts.hedged;
        push(*idle[i], late[i]);
        flush(*idle[i], true);
    }
}

// ---- sending ----

// Lets each connection send. On a long line they take chunks in turn, so that none of them has more to repair than others.
void Engine::pump(Peer& peer) {
    auto& all = peer.connections;
    if (all.empty()) return;
    flush(*all[0], !peer.is_long());
    ++peer.turn;  // so that no connection cools down
    for (bool again = true; again;) {
        again = false;
        for (size_t i = 1; i < all.size(); ++i) {
            Connection& c = *all[1 + (peer.turn + i) % (all.size() - 1)];
            again = flush(c, !peer.is_long()) || again;
        }
    }
}

void Engine::push(Connection& c, std::shared_ptr<Chunk> chunk) {
    c.pushed += sizeof(Header) + chunk->header.length;
    Header header = chunk->header;
    c.frames.push_back({header, std::move(chunk), c.pushed});
}

void Engine::control(Connection& c, Kind kind, uint64_t number, uint64_t offset) {
    c.pushed += sizeof(Header);
    c.frames.push_back({{kind, 0, number, kind == kAck ? c.peer->placed : 0, offset}, nullptr, c.pushed});
}

// Whether a chunk may be sent for the first time: the peer expects its message, or need not keep more than `most` bytes. The peer
// is asked at half of that, so that a message which it expects does not have to wait.
bool Engine::may_leave(Connection& c, uint64_t number, uint64_t length, uint64_t most) {
    Peer& peer = *c.peer;
    const uint64_t sent = peer.sent + kCost + length, ahead = sent - peer.taken;
    auto held = peer.held.find(number);
    if (held == peer.held.end() && ahead > most / 2) {
        held = peer.held.emplace(number, false).first;
        control(c, kAsk, number + 1);
    }
    if (ahead > most && !held->second) return false;
    peer.sent = sent;
    return true;
}

// Gives a connection its next chunk, if there is one for it. It may also get questions.
bool Engine::take_work(Connection& c) {
    Peer& peer = *c.peer;
    if (c.unacknowledged() > kWindow / peer.connections.size()) return false;
    bool is_first = peer.connections.front().get() == &c, is_alone = peer.connections.size() == 1;
    for (auto chunk = peer.small.begin(); is_first && chunk != peer.small.end(); ++chunk) {
        const Header& h = (*chunk)->header;
        if (!may_leave(c, h.number, h.length, early_bytes_)) continue;
        peer.held.erase(h.number);
        push(c, std::move(*chunk));
        peer.small.erase(chunk);
        return true;
    }
    if (is_first && !is_alone) return false;
    while (!peer.again.empty() && peer.again.front()->is_acked) peer.again.pop_front();
    if (peer.again.empty() && peer.bulk.empty()) {
        peer.is_heavy = false;
        return false;
    }
    if (c.is_steady == peer.is_heavy && peer.has(!c.is_steady)) return false;
    // Near the end of what there is to send, a connection whose window is full leaves it to others.
    if (peer.is_long() && !c.is_steady) {
        uint64_t left = peer.left_of_bulk();
        deepen(peer, left);
        if (left < 2 * peer.chunk_bytes() * peer.connections.size() && info_of(c.fd).room < 1) return false;
    }
    if (!peer.again.empty()) {
        push(c, std::move(peer.again.front()));
        peer.again.pop_front();
        ++peer.counts.resent;
        return true;
    }
    for (auto out = peer.bulk.begin(); out != peer.bulk.end(); ++out) {
        const uint64_t length = std::min(out->chunk, out->part.bytes - out->next);
        if (!may_leave(c, out->part.number, length, early_bytes_ - early_bytes_ / 8)) continue;  // the rest is for small ones
        peer.is_held = false;
        auto chunk = std::make_shared<Chunk>();
        chunk->header = {kData, static_cast<uint32_t>(length), out->part.number, out->part.bytes, out->next};
        chunk->data = out->part.data + out->next;
        chunk->op = out->op;
        out->next += length;
        if (out->next == out->part.bytes) peer.held.erase(out->part.number), peer.bulk.erase(out);
        push(c, std::move(chunk));
        ++peer.counts.chunks;
        return true;
    }
    peer.is_held = !peer.bulk.empty();
    return false;
}

// How much connections hold beyond their windows: little near the end, so that none of them keeps what others could send.
void Engine::deepen(Peer& peer, uint64_t left) {
    bool is_deep = left > (peer.is_deep ? kDeep / 2 : kDeep);
    if (is_deep == peer.is_deep) return;
    peer.is_deep = is_deep;
#ifdef TCP_NOTSENT_LOWAT
    for (auto& c : peer.connections)
        if (!c->is_dead && !c->is_steady) set(c->fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, is_deep ? kHoldDeep : kHold);
#endif
}

// Sends what a connection has, then what it can get: one chunk, or all. Returns whether it could take more.
bool Engine::flush(Connection& c, bool all) {
    while (!c.is_dead && !c.is_blocked) {
        bool is_new = c.unwritten == c.frames.size();
        if (is_new && !c.sealed() && !take_work(c) && c.unwritten == c.frames.size()) break;
        iovec pieces[32];
        int count = 0;
        size_t asked = 0, skip = c.part;
        for (size_t i = c.unwritten; i < c.frames.size() && count < 31; ++i) {
            auto& frame = c.frames[i];
            if (skip < sizeof(Header)) {
                pieces[count++] = {reinterpret_cast<uint8_t*>(&frame.header) + skip, sizeof(Header) - skip};
                asked += sizeof(Header) - skip;
                skip = 0;
            } else {
                skip -= sizeof(Header);
            }
            if (frame.chunk) {
                pieces[count++] = {const_cast<uint8_t*>(frame.chunk->data) + skip, frame.chunk->header.length - skip};
                asked += frame.chunk->header.length - skip;
            }
            skip = 0;
        }
        ssize_t sent = c.send(pieces, count);
        if (sent < 0 && errno == EINTR) continue;
        if (sent < 0 && errno != EAGAIN && errno != EWOULDBLOCK)
            return drop(c, errno == EPIPE ? Event::kEnded : errno == ECONNRESET ? Event::kReset : Event::kLost), false;
        if (sent < static_cast<ssize_t>(asked) || c.sealed()) {
            c.is_blocked = true;
            wake();
        }
        if (sent > 0) advance(c, static_cast<size_t>(sent));
        if (is_new && !all) return !c.is_blocked;
    }
    if (c.ends && !c.is_dead && c.unwritten == c.frames.size() && !c.sealed()) shutdown(c.fd, SHUT_WR), c.ends = false;
    return false;
}

void Engine::acknowledge(Connection& c, uint64_t offset) {
    c.told = c.taken;
    control(c, kAck, c.told, offset);
    flush(c, true);
}

void Engine::advance(Connection& c, size_t count) {
    c.written += count;
    while (c.unwritten < c.frames.size() && c.frames[c.unwritten].end <= c.written) {
        auto chunk = c.frames[c.unwritten++].chunk;
        if (!chunk) continue;
        chunk->sent_at = c.peer->moved = now();
        if (chunk->is_written) continue;
        chunk->is_written = true;
        if (--chunk->op->left == 0) release(chunk->op);
    }
    c.part = c.unwritten < c.frames.size()
                 ? c.written - (c.frames[c.unwritten].end - sizeof(Header) - c.frames[c.unwritten].header.length)
                 : 0;
    if (c.part && c.frames[c.unwritten].chunk) c.peer->moved = now();
}

void Engine::acknowledged(Connection& c, uint64_t position) {
    while (c.unwritten > 0 && c.frames.front().end <= position) {
        auto chunk = std::move(c.frames.front().chunk);
        c.frames.pop_front();
        --c.unwritten;
        if (!chunk || std::exchange(chunk->is_acked, true)) continue;
        // It waits to be sent again if another connection that had it was lost, and now never will be.
        if (!std::exchange(chunk->is_written, true) && --chunk->op->left == 0) release(chunk->op);
        if (--chunk->op->unacked == 0 && chunk->op->is_done) settle(chunk->op);
    }
}

void Engine::release(const std::shared_ptr<Operation>& op) {
    op->is_done = true;
    op->done.notify_all();
    if (op->unacked == 0) settle(op);
}

// The memory of a done operation is given back: when somebody has waited for it, or all is acknowledged. What may have to be
// sent again is copied, and so is what another connection has not sent yet; that is the less, the later the caller waits.
void Engine::settle(const std::shared_ptr<Operation>& op) {
    if (std::exchange(op->is_settled, true)) return;
    finished_.push_back(op->id);
    if (op->unacked == 0 && !op->is_hedged) return;
    auto keep = [&](Chunk* chunk, bool is_needed) {
        if (chunk->op != op || !is_needed || chunk->kept) return;
        chunk->kept = copies_.take(chunk->header.length);
        std::memcpy(chunk->kept.get(), chunk->data, chunk->header.length);
        chunk->data = chunk->kept.get();
    };
    std::sort(op->peers.begin(), op->peers.end());
    op->peers.erase(std::unique(op->peers.begin(), op->peers.end()), op->peers.end());
    for (int rank : op->peers) {
        Peer& peer = peers_[static_cast<size_t>(rank)];
        for (auto& chunk : peer.again) keep(chunk.get(), !chunk->is_acked);
        for (auto& c : peer.connections)
            for (size_t i = 0; i < c->frames.size(); ++i)
                if (Chunk* chunk = c->frames[i].chunk.get()) keep(chunk, i >= c->unwritten || !chunk->is_acked);
    }
}

// ---- receiving ----

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
        return lose_one(peer, mismatch(peer.rank, h.total, message.total)), false;
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

// ---- failures ----

// The connection has ended. What may not have arrived over it goes over others.
void Engine::drop(Connection& c, Event::What how) {
    if (c.is_dead) return;
    Peer& peer = *c.peer;
    c.is_dead = died_ = true;
    c.message = nullptr;
    shutdown(c.fd, SHUT_RDWR);  // a process that was forked from this one has the socket too
    ::close(c.fd);
    --peer.counts.connections;
    for (auto held = peer.held.begin(); held != peer.held.end();)  // the answer may be lost: it is asked again
        held = held->second ? std::next(held) : peer.held.erase(held);
    if (failure_.empty() && peer.gone.empty() && !closing_) {
        if (!peer.has_unsent()) peer.moved = now();
        for (auto& frame : c.frames) {
            if (!frame.chunk || frame.chunk->is_acked) continue;
            if (frame.chunk->is_written && !frame.chunk->op->is_done) ++frame.chunk->op->left;
            frame.chunk->is_written = frame.chunk->op->is_done;
            peer.again.push_back(frame.chunk);
        }
        events_.push_back({how, peer.rank, peer.counts.connections});
        events_ready_.notify_all();
    }
    wake();
}

// Only the engine's own thread frees connections: it may be waiting for them.
void Engine::sweep() {
    for (Peer& peer : peers_) {
        auto& all = peer.connections;
        all.erase(std::remove_if(all.begin(), all.end(), [](auto& c) { return c->is_dead; }), all.end());
    }
}

// The peer says that it goes, or what it says cannot be true.
void Engine::leave(Connection& c, const std::string& what) {
    lose_one(*c.peer, "rank " + std::to_string(c.peer->rank) + " " + what);
}

void Engine::lose_one(Peer& peer, const std::string& reason) {
    bool is_news = peer.gone.empty();
    if (is_news) peer.gone = reason;
    if (is_channel_) return fail(peer, peer.gone);
    for (auto& c : peer.connections) drop(*c);
    check_gone(peer);
    if (!is_news || !failure_.empty()) return;
    events_.push_back({Event::kGone, peer.rank, 0});
    events_ready_.notify_all();
}

// A peer that is gone fails the operations that need it.
void Engine::check_gone(Peer& peer) {
    if (peer.gone.empty() || !failure_.empty()) return;
    bool is_needed = !peer.expected.empty() || !peer.small.empty() || !peer.bulk.empty();
    for (auto& chunk : peer.again) is_needed = is_needed || !chunk->op->is_done;
    if (is_needed) return fail(peer, peer.gone);
    peer.again.clear();
}

void Engine::end_operations(const std::string& reason, const Peer* only) {
    for (auto& [id, op] : operations_) {
        if (only && (op->peers.empty() || op->peers.front() != only->rank)) continue;
        if (!std::exchange(op->is_settled, true)) finished_.push_back(id);
        if (op->is_done) continue;
        op->error = reason;
        op->is_done = true;
        op->done.notify_all();
    }
    flushed_.notify_all();
}

// On a channel, a peer fails alone; else all do.
void Engine::fail(Peer& culprit, const std::string& reason) {
    if (!failure_.empty()) return;
    (is_channel_ ? culprit.gone : failure_) = reason;
    for (Peer& peer : peers_) {
        if (is_channel_ && &peer != &culprit) continue;
        for (auto& c : peer.connections) {
            if (c->is_dead) continue;
            Header goodbye{kFail, 0, static_cast<uint64_t>(culprit.rank), 0, 0};
            iovec words{&goodbye, sizeof goodbye};
            if (c->part == 0 && c->send(&words, 1) > 0) shutdown(c->fd, SHUT_WR);
            drop(*c);
        }
        peer.small.clear(), peer.again.clear(), peer.bulk.clear();
        for (auto& [number, op] : peer.expected) peer.incoming.erase(number);  // what came early may still be received
        peer.expected.clear();
    }
    end_operations(reason, is_channel_ ? &culprit : nullptr);
    events_.push_back({is_channel_ ? Event::kGone : Event::kFailed, culprit.rank, 0});
    events_ready_.notify_all();
}

}  // namespace thinwire::wire
