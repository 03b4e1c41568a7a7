// The network between hosts of netlab.py that are joined by lines with delay and loss: one thread that forwards IPv4 packets.
//
//     forwarder SEED NAMESPACE...        one TUN device, eth0, in each network namespace
//
// It prints "ready", then reads commands from standard input, answers each with "ok", and ends when standard input does.
// Times are in seconds, rates in bits per second, chances from 0 to 1.
//
//     address HOST PUBLIC [PRIVATE]                        IPv4; with PRIVATE, the host is behind NAT
//     rate HOST UP DOWN QUEUE                              QUEUE: what may wait in front of a rate, in seconds
//     path FROM TO DELAY JITTER LOSS REORDER               one direction between two hosts
//     cut HOST, mend HOST                                  drop all packets of a host; stop dropping them
//
// A packet waits for the sender's rate, then takes the path's delay, then waits for the receiver's rate. A packet that finds
// a full queue is dropped. Jitter changes the delay slowly enough to keep the order of packets; a reordered packet is held
// back while later ones pass.

#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <queue>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

namespace {

constexpr int kMaxPacket = 65536;
constexpr int kReadsPerHost = 64;            // packets that one host may send before the others are looked at
constexpr double kHeldBack[] = {1e-3, 5e-3};  // seconds by which a reordered packet is late

double now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

[[noreturn]] void fail(const std::string& what) {
    std::fprintf(stderr, "forwarder: %s: %s\n", what.c_str(), std::strerror(errno));
    std::exit(1);
}

// What waits in front of a rate, kept as the time at which the last bit has left.
struct Rate {
    double bits_per_second = 1e9, queue_seconds = 0.05, free_at = 0;

    // When a packet that comes at `at` has left, or a negative number if the queue is full.
    double leaves(double at, size_t bytes) {
        double start = std::max(at, free_at);
        if (start - at > queue_seconds) return -1;
        return free_at = start + 8.0 * static_cast<double>(bytes) / bits_per_second;
    }
};

// A delay that moves from one random value to the next within `period`.
struct Path {
    double delay = 0, jitter = 0, loss = 0, reorder = 0;
    double from = 0, to = 0, begin = 0, last_arrival = 0;

    template <typename Random>
    double delay_at(double at, Random&& random) {
        if (jitter == 0) return delay;
        double period = std::max(0.02, 4 * jitter);  // a slope of at most a half, so that packets keep their order
        if (at >= begin + period) {
            from = at >= begin + 2 * period ? (2 * random() - 1) * jitter : to;
            to = (2 * random() - 1) * jitter;
            begin = at;
        }
        return std::max(0.0, delay + from + (to - from) * (at - begin) / period);
    }
};

using Flow = std::tuple<uint8_t, uint16_t, uint32_t, uint16_t>;  // protocol, inner port, peer's address and port

struct Host {
    int device = -1;
    uint32_t public_address = 0, private_address = 0;  // network order; private: 0 without NAT
    Rate up, down;
    bool cut = false;
    std::set<Flow> flows;  // that a host behind NAT has begun
};

struct Event {
    double at;
    uint64_t number;  // equal times keep their order
    int to;
    bool arrived;  // at the receiver's rate, not yet at the receiver
    std::shared_ptr<std::vector<uint8_t>> packet;
    bool operator>(const Event& other) const { return std::tie(at, number) > std::tie(other.at, other.number); }
};

uint16_t read16(const uint8_t* p) { return static_cast<uint16_t>(p[0] << 8 | p[1]); }

uint32_t address_at(const uint8_t* p) {
    uint32_t address;
    std::memcpy(&address, p, 4);
    return address;
}

// Internet checksums change by the difference of what they cover (RFC 1624).
void adjust(uint8_t* checksum, uint32_t before, uint32_t after) {
    uint32_t sum = static_cast<uint16_t>(~read16(checksum));
    uint32_t old_value = ntohl(before), new_value = ntohl(after);
    sum += (~old_value >> 16 & 0xFFFF) + (~old_value & 0xFFFF) + (new_value >> 16) + (new_value & 0xFFFF);
    while (sum >> 16) sum = (sum & 0xFFFF) + (sum >> 16);
    sum = ~sum & 0xFFFF;
    checksum[0] = static_cast<uint8_t>(sum >> 8);
    checksum[1] = static_cast<uint8_t>(sum);
}

struct Headers {
    uint8_t protocol;
    size_t ip_bytes;
    bool ports;  // the first fragment of TCP or UDP
};

Headers headers_of(const std::vector<uint8_t>& p) {
    Headers h{p[9], static_cast<size_t>(p[0] & 15) * 4, false};
    bool first = (read16(&p[6]) & 0x1FFF) == 0;
    h.ports = first && (h.protocol == IPPROTO_TCP || h.protocol == IPPROTO_UDP) && p.size() >= h.ip_bytes + 20;
    h.ports |= first && h.protocol == IPPROTO_UDP && p.size() >= h.ip_bytes + 8;
    return h;
}

// Writes an address into the IP header at `offset` (12: source, 16: destination), and mends the checksums.
void rewrite(std::vector<uint8_t>& p, size_t offset, uint32_t address) {
    Headers h = headers_of(p);
    uint32_t before = address_at(&p[offset]);
    std::memcpy(&p[offset], &address, 4);
    adjust(&p[10], before, address);
    if (!h.ports) return;
    uint8_t* checksum = &p[h.ip_bytes + (h.protocol == IPPROTO_TCP ? 16 : 6)];
    if (h.protocol == IPPROTO_TCP || read16(checksum)) adjust(checksum, before, address);
}

// The flow of a packet, seen from the host behind NAT.
Flow flow_of(const std::vector<uint8_t>& p, bool outbound) {
    Headers h = headers_of(p);
    uint16_t source = h.ports ? read16(&p[h.ip_bytes]) : 0, destination = h.ports ? read16(&p[h.ip_bytes + 2]) : 0;
    if (outbound) return {h.protocol, source, address_at(&p[16]), destination};
    return {h.protocol, destination, address_at(&p[12]), source};
}

class Forwarder {
  public:
    Forwarder(uint64_t seed, const std::vector<std::string>& namespaces)
        : random_bits_(seed), hosts_(namespaces.size()), paths_(hosts_.size() * hosts_.size()) {
        for (size_t i = 0; i < hosts_.size(); i++) hosts_[i].device = open_device(namespaces[i]);
    }

    void run() {
        std::vector<pollfd> polled{{STDIN_FILENO, POLLIN, 0}};
        for (Host& host : hosts_) polled.push_back({host.device, POLLIN, 0});
        std::puts("ready");
        std::fflush(stdout);
        while (true) {
            deliver_due();
            timespec wait{};
            if (!events_.empty()) {
                double left = std::max(0.0, events_.top().at - now());
                wait.tv_sec = static_cast<time_t>(left);
                wait.tv_nsec = static_cast<long>(1e9 * (left - static_cast<double>(wait.tv_sec)));
            }
            if (ppoll(polled.data(), polled.size(), events_.empty() ? nullptr : &wait, nullptr) < 0 && errno != EINTR)
                fail("ppoll");
            if (polled[0].revents && !read_commands()) return;
            for (size_t i = 0; i < hosts_.size(); i++)
                if (polled[i + 1].revents & POLLIN) receive(static_cast<int>(i));
        }
    }

  private:
    double random() { return std::uniform_real_distribution<double>(0, 1)(random_bits_); }

    Path& path(int from, int to) { return paths_[static_cast<size_t>(from) * hosts_.size() + static_cast<size_t>(to)]; }

    static int open_device(const std::string& name) {
        int space = open(("/run/netns/" + name).c_str(), O_RDONLY | O_CLOEXEC);
        if (space < 0 || setns(space, CLONE_NEWNET) < 0) fail("namespace " + name);
        close(space);
        int device = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
        if (device < 0) fail("/dev/net/tun");
        ifreq request{};
        request.ifr_flags = IFF_TUN | IFF_NO_PI;
        std::strcpy(request.ifr_name, "eth0");
        if (ioctl(device, TUNSETIFF, &request) < 0) fail("a TUN device in " + name);
        return device;
    }

    void receive(int from) {
        uint8_t buffer[kMaxPacket];
        for (int i = 0; i < kReadsPerHost; i++) {
            ssize_t bytes = read(hosts_[from].device, buffer, sizeof buffer);
            if (bytes < 0) return;  // nothing left
            if (bytes >= 20 && buffer[0] >> 4 == 4)
                send(from, std::make_shared<std::vector<uint8_t>>(buffer, buffer + bytes));
        }
    }

    void send(int from, std::shared_ptr<std::vector<uint8_t>> packet) {
        double at = now();
        Host& sender = hosts_[from];
        double left = sender.up.leaves(at, packet->size());
        if (left < 0 || sender.cut) return;
        if (sender.private_address) {
            sender.flows.insert(flow_of(*packet, true));
            rewrite(*packet, 12, sender.public_address);
        }
        uint32_t destination = address_at(&(*packet)[16]);
        for (size_t to = 0; to < hosts_.size(); to++)
            if (hosts_[to].public_address == destination && static_cast<int>(to) != from)
                travel(from, static_cast<int>(to), left, std::move(packet));
    }

    void travel(int from, int to, double left, std::shared_ptr<std::vector<uint8_t>> packet) {
        Path& line = path(from, to);
        if (random() < line.loss) return;
        double arrival = std::max(line.last_arrival, left + line.delay_at(left, [this] { return random(); }));
        if (random() < line.reorder)
            arrival += kHeldBack[0] + (kHeldBack[1] - kHeldBack[0]) * random();
        else
            line.last_arrival = arrival;
        events_.push({arrival, count_++, to, true, std::move(packet)});
    }

    void deliver_due() {
        while (!events_.empty() && events_.top().at <= now()) {
            Event event = events_.top();
            events_.pop();
            Host& host = hosts_[event.to];
            if (host.cut) continue;
            if (!event.arrived) {
                if (write(host.device, event.packet->data(), event.packet->size()) < 0 && errno != EIO && errno != ENOBUFS &&
                    errno != EAGAIN && errno != EINVAL)
                    fail("writing to a TUN device");
                continue;
            }
            if (host.private_address) {
                if (!host.flows.count(flow_of(*event.packet, false))) continue;
                rewrite(*event.packet, 16, host.private_address);
            }
            double done = host.down.leaves(event.at, event.packet->size());
            if (done >= 0) events_.push({done, count_++, event.to, false, std::move(event.packet)});
        }
    }

    bool read_commands() {
        char buffer[4096];
        ssize_t bytes = read(STDIN_FILENO, buffer, sizeof buffer);
        if (bytes <= 0) return false;
        commands_.append(buffer, static_cast<size_t>(bytes));
        for (size_t end; (end = commands_.find('\n')) != std::string::npos; commands_.erase(0, end + 1)) {
            std::istringstream words(commands_.substr(0, end));
            std::puts(obey(words) ? "ok" : "not understood");
            std::fflush(stdout);
        }
        return true;
    }

    bool obey(std::istringstream& words) {
        std::string command, address, inner;
        size_t i = 0, j = 0;
        if (!(words >> command >> i) || i >= hosts_.size()) return false;
        Host& host = hosts_[i];
        if (command == "cut" || command == "mend") {
            host.cut = command == "cut";
            return true;
        }
        if (command == "address" && words >> address) {
            if (words >> inner && inet_pton(AF_INET, inner.c_str(), &host.private_address) != 1) return false;
            return inet_pton(AF_INET, address.c_str(), &host.public_address) == 1;
        }
        if (command == "rate") {
            double up, down, queue;
            if (!(words >> up >> down >> queue) || up <= 0 || down <= 0) return false;
            host.up.bits_per_second = up;
            host.down.bits_per_second = down;
            host.up.queue_seconds = host.down.queue_seconds = queue;
            return true;
        }
        if (command == "path" && words >> j && j < hosts_.size()) {
            Path& line = path(static_cast<int>(i), static_cast<int>(j));
            return static_cast<bool>(words >> line.delay >> line.jitter >> line.loss >> line.reorder);
        }
        return false;
    }

    std::mt19937_64 random_bits_;
    std::vector<Host> hosts_;
    std::vector<Path> paths_;
    std::priority_queue<Event, std::vector<Event>, std::greater<Event>> events_;
    uint64_t count_ = 0;
    std::string commands_;
};

}  // namespace

int main(int argc, char** argv) {
    if (argc < 3) {
        std::fputs("usage: forwarder SEED NAMESPACE...\n", stderr);
        return 2;
    }
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    prctl(PR_SET_TIMERSLACK, 1UL);
    Forwarder(std::strtoull(argv[1], nullptr, 10), {argv + 2, argv + argc}).run();
}
