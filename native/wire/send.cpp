// What each connection sends next, and what has been acknowledged.
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "line.hpp"
#include "peer.hpp"

namespace thinwire::wire {

namespace {

constexpr uint64_t kDeep = 8 << 20;         // with so many bytes left, connections hold more of them, against starving
constexpr uint64_t kWindow = 128 << 20;     // bytes that a peer may leave unacknowledged: copies of them are kept

}  // namespace

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
        if (!c->is_dead && !c->is_steady) set_option(c->fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, is_deep ? kHoldDeep : kHold);
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

}  // namespace thinwire::wire
