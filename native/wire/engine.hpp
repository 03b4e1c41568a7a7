// Messages between workers over several TCP connections a pair, by one thread.
//
// Who connects and who is whom is decided elsewhere: `attach` takes connected sockets. The engine cuts messages into chunks;
// each connection takes the next chunk when it can send. Small messages go first, on a connection of their own where there are
// two. A chunk that was sent over a connection that is lost is sent again over another one; the receiver drops what it has. So
// connections may come and go, and nothing is lost or comes twice.
//
// Memory  Belongs to an operation until `wait` says that it is done, or `finished` names it. Chunks that are not acknowledged
//         when `wait` returns are copied.
// Errors  Fail everything: all operations, with the same words, and all peers are told. In the engine of a channel, each operation
//         is with one peer, and who loses a peer fails the operations with that peer alone. What has come from it stays.
// Early   What comes for an operation that has not begun is kept, within a bound. The sender holds back the rest, message by
//         message, so that those of operations that have begun go on.
// Life    The engine of a channel lets its peers know every quarter of the time limit that it is there.
// Events  For who connects: a connection was lost, or the peer's system ended or reset it; more would be faster; a peer is gone
//         for good; all has failed. Who gives up a silent connection resets it.
// Files   frame.hpp, what crosses a connection; peer.hpp, what is kept of peers and connections; engine.cpp, what other threads
//         call, the thread and failures; send.cpp; receive.cpp; watch.cpp, what is done when time has passed.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "frame.hpp"
#include "tls.hpp"

namespace thinwire::wire {

struct Part {  // one message
    int peer;
    uint64_t number;
    uint8_t* data;
    uint64_t bytes;
};

struct Event {
    enum What { kLost, kEnded, kReset, kWant, kGone, kFailed };
    int what, peer, number;  // number: connections that are left, or that are wanted
};

struct Counts {  // of one peer
    int connections = 0;
    uint64_t chunks = 0, hedged = 0, resent = 0, duplicates = 0;  // chunks sent, sent again in time or after a loss, and dropped
    double round_trip_seconds = 0;
};

constexpr uint64_t kEarly = 64 << 20;

class Engine {
  public:
    // early_bytes: of one peer, kept for operations that this worker has not started; the same for all workers.
    Engine(int rank, int size, double timeout_seconds, bool is_channel = false, uint64_t early_bytes = kEarly);
    ~Engine();  // does not wait for anything

    // Takes a connected socket, which then is the engine's, and what encrypts it, if anything does.
    void attach(int peer, int descriptor, std::shared_ptr<Session> session = nullptr);
    uint64_t post(const std::vector<Part>& sends, const std::vector<Part>& receives);
    bool wait(uint64_t operation, double seconds);          // whether it is done; throws std::runtime_error if it failed
    std::vector<uint64_t> finished();                       // operations that have given back their memory since the last call
    // Waits until one of these messages (peer, number) has begun to come; returns which, or -1. None may be expected.
    int begun(const std::vector<std::pair<int, uint64_t>>& messages, double seconds);
    // Waits until one of these operations is done or has failed; returns which; -1: none, -2: `interrupt` was called.
    int first(const std::vector<uint64_t>& operations, double seconds);
    void interrupt();                                       // ends a `first` under way, or else the next one
    std::vector<Event> events(double seconds);              // waits for the first one
    void cut();                                             // all connections; what they had goes over new ones
    void connects(int peer, bool is_mine);                  // which of both makes the connections; at first, the higher rank
    void lose(int peer, const std::string& reason);         // the peer is dead
    // Whether peers have all that was sent, which it waits for. Connections that are lost meanwhile are made anew.
    bool drained(double seconds);
    void close(double seconds);                             // says goodbye once peers have all, or after so many seconds
    Counts counts(int peer);

  private:
    struct Operation;
    struct Chunk;
    struct Connection;
    struct Peer;
    using Lock = std::unique_lock<std::mutex>;

    void run();
    void end_thread();
    double tick(double now);
    std::string limit_text() const;
    void watch_silent(Peer& peer, double now);
    void watch_stripes(Peer& peer, double now);
    void hedge(Peer& peer, double now);
    void pump(Peer& peer);
    bool flush(Connection& c, bool all);
    void deepen(Peer& peer, uint64_t left);
    bool may_leave(Connection& c, uint64_t number, uint64_t length, uint64_t most);
    bool take_work(Connection& c);
    void push(Connection& c, std::shared_ptr<Chunk> chunk);
    void control(Connection& c, Kind kind, uint64_t number, uint64_t offset = 0);
    void acknowledge(Connection& c, uint64_t offset = 0);
    bool answer(Connection& c, uint64_t number);
    void advance(Connection& c, size_t count);
    void acknowledged(Connection& c, uint64_t position);
    void read(Connection& c);
    void parse(Connection& c);
    bool begin(Connection& c);
    void hear(Connection& c);
    void end(Connection& c);
    void finish_message(Peer& peer, uint64_t number);
    void release(const std::shared_ptr<Operation>& op);
    void settle(const std::shared_ptr<Operation>& op);
    void drop(Connection& c, Event::What how = Event::kLost);
    void sweep();
    void leave(Connection& c, const std::string& what);
    void lose_one(Peer& peer, const std::string& reason);
    void fail(Peer& culprit, const std::string& reason);
    void end_operations(const std::string& reason, const Peer* only = nullptr);
    void check_gone(Peer& peer);
    void wake();

    const int rank_;
    const double timeout_;
    const bool is_channel_;
    const uint64_t early_bytes_;
    const int process_;
    std::mutex mutex_;
    Copies copies_;  // outlives the chunks
    std::condition_variable events_ready_, flushed_;
    std::vector<Peer> peers_;
    std::unordered_map<uint64_t, std::shared_ptr<Operation>> operations_;
    std::vector<uint64_t> finished_;
    std::deque<Event> events_;
    std::string failure_;
    uint64_t next_operation_ = 0;
    bool stop_ = false, closing_ = false, polling_ = false, died_ = false, is_interrupted_ = false;
    std::vector<uint8_t> scratch_;
    int wake_[2];
    std::thread thread_;
};

}  // namespace thinwire::wire
