#include "engine.hpp"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <system_error>
#include <utility>

#include "line.hpp"
#include "peer.hpp"

namespace thinwire::wire {

namespace {

constexpr double kSlow = 0.06;              // and one on which repairing a lost packet takes long
constexpr double kMostIdle = 70;            // seconds without an answer, until an idle one is; longer than most queues

auto after(double seconds) { return std::chrono::steady_clock::now() + std::chrono::microseconds(static_cast<int64_t>(1e6 * seconds)); }

}  // namespace

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
    set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
    Info info = info_of(fd);
    double least = info.least_round_trip > 0 ? std::min(info.least_round_trip, info.round_trip) : info.round_trip;
    if (least > 0) peer.round_trip = std::min(peer.round_trip, least);
    // While nothing is sent, probes find out that the line is dead, or that the peer has given up the connection.
    set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
#ifdef __linux__
    set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, static_cast<int>(kPatience));
    set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, 2);
    set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, std::max(3, static_cast<int>(std::min(timeout_ / 2, kMostIdle) - kPatience) / 2));
#endif
#ifdef SO_MAX_PACING_RATE
    // Any limit makes TCP spread a window over the round trip, at its own rate; a burst would overflow the line's queue.
    if (peer.is_long()) set_option(fd, SOL_SOCKET, SO_MAX_PACING_RATE, 1 << 30);
#endif
    auto c = std::make_unique<Connection>();
    if (peer.is_long()) c->is_steady = peer.has(false) && !peer.has(true) && peer.round_trip > kSlow && choose_control(fd, "bbr");
    if (peer.is_long() && !c->is_steady && !choose_control(fd, "cubic")) choose_control(fd, "reno");
#ifdef TCP_NOTSENT_LOWAT
    set_option(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, peer.is_long() && !c->is_steady ? kHold : kHoldNear);
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
            peer.gone = peer.mismatch(message.total, part.bytes);
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
