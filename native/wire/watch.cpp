// Time limits, silent connections, stripes and late chunks: what the engine looks after when time has passed.
#include <sys/socket.h>

#include <algorithm>
#include <cstdio>

#include "line.hpp"
#include "peer.hpp"

namespace thinwire::wire {

namespace {

constexpr int kSigns = 4;                   // of life, in the time limit, so that a late one does no harm
constexpr int kMaxCopies = 3;               // of a chunk that is late
constexpr double kLook = 1;                 // seconds between two looks at what arrives

}  // namespace

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

}  // namespace thinwire::wire
