// Runs the engine of `native/wire` under a sanitizer: `scripts/sanitize.sh` builds and starts it.
//
//     wire loopback [CERTIFICATE KEY]    two engines talk from several threads while their connections are cut, as for collectives
//                                        and as for a channel, and as on a long line
//     wire fuzz INPUTS [SEED]            an engine gets damaged frames
//
// It ends with an error if a byte is wrong or an operation does not end; the sanitizer ends it at a data race, a wrong address
// or undefined behaviour.
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../wire/engine.hpp"

using namespace thinwire::wire;
using Bytes = std::vector<uint8_t>;
using Random = std::mt19937_64;

namespace {

constexpr double kSeconds = 60;
constexpr uint64_t kEarlyBytes = 1 << 19;  // less than some messages, so that they are held back

void require(bool condition, const std::string& what) {
    if (condition) return;
    std::fprintf(stderr, "wire: %s\n", what.c_str());
    std::exit(1);
}

std::array<int, 2> connected() {
    std::array<int, 2> ends;
    require(socketpair(AF_UNIX, SOCK_STREAM, 0, ends.data()) == 0, "no pair of sockets");
    return ends;
}

Bytes noise(size_t size, uint64_t seed) {
    Random random(seed);
    Bytes bytes(size);
    for (auto& byte : bytes) byte = static_cast<uint8_t>(random());
    return bytes;
}

// ---- a long line ----

std::atomic<bool> is_far{false};

uint32_t chance(uint32_t below) {
    thread_local Random random(reinterpret_cast<uintptr_t>(&random));
    return static_cast<uint32_t>(random() % below);
}

}  // namespace

#ifdef __linux__
// In place of the system's: with `is_far`, a pair of sockets has a round trip of about 5 ms, and now and then bytes on their way, so
// that the engine sends late chunks again.
extern "C" int getsockopt(int fd, int level, int option, void* value, socklen_t* size) noexcept {
    if (!is_far || level != IPPROTO_TCP || option != TCP_INFO)
        return static_cast<int>(syscall(SYS_getsockopt, fd, level, option, value, size));
    uint32_t info[64] = {};  // struct tcp_info of linux/tcp.h
    info[16 / 4] = 1448, info[68 / 4] = 4000 + chance(3000), info[80 / 4] = chance(40), info[148 / 4] = 4000;
    std::memcpy(value, info, std::min<size_t>(*size, sizeof info));
    return 0;
}

extern "C" int ioctl(int fd, unsigned long what, ...) noexcept {
    va_list rest;
    va_start(rest, what);
    void* value = va_arg(rest, void*);
    va_end(rest);
    if (!is_far || what != TIOCOUTQ) return static_cast<int>(syscall(SYS_ioctl, fd, what, value));
    *static_cast<int*>(value) = chance(3) ? 0 : static_cast<int>(chance(300'000));
    return 0;
}
#endif

namespace {

// ---- two engines ----

class Pair {
  public:
    Pair(const std::string& certificate, const std::string& key, bool is_channel)
        : engines_{Engine(0, 2, kSeconds, is_channel, kEarlyBytes), Engine(1, 2, kSeconds, is_channel, kEarlyBytes)} {
        if (certificate.empty()) return;
        context_ = std::make_unique<Context>(certificate, key, certificate, "", 7);  // keys are renewed all the time
    }

    Engine& operator[](size_t rank) { return engines_[rank]; }

    // Connects the engines, and returns a handle by which to cut the connection.
    int connect() {
        auto ends = connected();
        int handle = dup(ends[0]);
        for (size_t rank = 0; rank < 2; ++rank) {
            auto session = context_ ? std::make_shared<Session>(*context_, ends[rank], rank == 1) : nullptr;
            engines_[rank].attach(1 - static_cast<int>(rank), ends[rank], session);
        }
        return handle;
    }

  private:
    std::unique_ptr<Context> context_;
    std::array<Engine, 2> engines_;
};

void cut(int handle) {
    shutdown(handle, SHUT_RDWR);
    close(handle);
}

// Sends messages of many sizes from one engine to the other, the numbers of which begin with `first`.
void talk(Pair& pair, int from, uint64_t first, uint64_t count) {
    Random random(first);
    const std::array<size_t, 5> sizes{1, 900, 20'000, 300'000, 900'000};
    for (uint64_t number = first; number < first + count; ++number) {
        Bytes sent = noise(sizes[random() % sizes.size()], number), received(sent.size()), expected = sent;
        const auto sender = static_cast<size_t>(from), receiver = 1 - sender;
        const bool is_early = number % 3 == 0;
        uint64_t there = 0, here;
        if (!is_early) there = pair[receiver].post({}, {{from, number, received.data(), received.size()}});
        if (!is_early) pair[receiver].first({there}, 0);
        here = pair[sender].post({{1 - from, number, sent.data(), sent.size()}}, {});
        const bool is_sent = pair[sender].wait(here, is_early ? 0.01 : kSeconds);  // else it is held back
        if (is_sent) std::fill(sent.begin(), sent.end(), uint8_t{0});  // it is the caller's again
        if (is_early) there = pair[receiver].post({}, {{from, number, received.data(), received.size()}});
        require(pair[sender].wait(here, kSeconds), "a send did not end");
        require(pair[receiver].wait(there, kSeconds), "a receive did not end");
        require(received == expected, "message " + std::to_string(number) + " is not what was sent");
    }
}

void loopback(bool is_channel, const std::string& certificate = "", const std::string& key = "") {
    constexpr uint64_t kMessages = 40;
    constexpr int kCuts = 60;  // and no more, so that slow machines get on
    Pair pair(certificate, key, is_channel);
    std::vector<int> live;
    for (int i = 0; i < (is_far ? 6 : 3); ++i) live.push_back(pair.connect());
    std::atomic<bool> is_over{false};
    std::thread watching([&] {
        while (!is_over) {
            for (size_t rank = 0; rank < 2; ++rank) {
                pair[rank].counts(1 - static_cast<int>(rank));
                pair[rank].finished();
                pair[rank].events(0.0005);
                pair[rank].interrupt();
            }
        }
    });
    std::thread cutting([&] {
        Random random(1);
        for (int cuts = 0; cuts < kCuts && !is_over; ++cuts) {
            std::this_thread::sleep_for(std::chrono::microseconds(random() % 10000));
            if (random() % 8 == 0) pair[0].cut();
            std::swap(live[random() % live.size()], live.back());
            cut(live.back());
            live.back() = pair.connect();
        }
    });
    std::vector<std::thread> talking;
    for (int from = 0; from < 2; ++from)
        for (uint64_t part = 0; part < 2; ++part)
            talking.emplace_back([&pair, from, part] { talk(pair, from, part * kMessages, kMessages); });
    for (auto& thread : talking) thread.join();
    is_over = true;
    watching.join(), cutting.join();
    std::thread closing([&] { pair[0].close(5); });
    pair[1].close(5);
    closing.join();
    for (int handle : live) close(handle);
}

// ---- damaged frames ----

void append(Bytes& all, const Header& header, const Bytes& body = {}) {
    auto bytes = reinterpret_cast<const uint8_t*>(&header);
    all.insert(all.end(), bytes, bytes + sizeof header);
    all.insert(all.end(), body.begin(), body.end());
}

// What an honest peer may say: chunks of two messages that are expected and of two that are not, in any order, and some twice.
Bytes conversation(Random& random) {
    struct Piece {
        Header header;
        Bytes body;
    };
    std::vector<Piece> pieces;
    for (uint64_t number = 0; number < 4; ++number) {
        const uint64_t total = number % 2 ? 100 : 30'000;
        for (uint64_t at = 0; at < total; at += 8192) {
            const auto length = static_cast<uint32_t>(std::min<uint64_t>(8192, total - at));
            pieces.push_back({{kData, length, number, total, at}, Bytes(length, static_cast<uint8_t>(number))});
        }
    }
    pieces.push_back({{kAsk, 0, 0, 0, 0}, {}});
    pieces.push_back({{kAsk, 0, 1 + random() % 5, 0, 0}, {}});
    pieces.push_back({{kWant, 0, random() % 100, 0, 0}, {}});
    pieces.push_back({{kAck, 0, 0, 0, 0}, {}});
    pieces.push_back(pieces[random() % pieces.size()]);
    std::shuffle(pieces.begin(), pieces.end(), random);
    Bytes all;
    for (const Piece& piece : pieces) append(all, piece.header, piece.body);
    if (random() % 4 == 0) append(all, {random() % 2 ? kBye : kFail, 0, random() % 3, 0, 0});
    return all;
}

// Flips bits, mostly in a header; writes large and small numbers; drops, repeats or inserts bytes.
void damage(Bytes& said, Random& random) {
    const uint64_t values[] = {0, 1, 31, 4095, 1 << 20, (1 << 20) + 1, 1ull << 31, 1ull << 46, 1ull << 63, ~0ull, ~31ull};
    for (size_t times = random() % 4; times > 0; --times) {
        size_t place = random() % said.size();
        const uint32_t kind = kData;
        if (random() % 4) {  // to where a header begins
            auto found = std::search(said.begin() + static_cast<long>(place), said.end(),
                                     reinterpret_cast<const uint8_t*>(&kind), reinterpret_cast<const uint8_t*>(&kind + 1));
            if (found != said.end()) place = static_cast<size_t>(found - said.begin());
        }
        const size_t left = said.size() - place, at = place + std::min(left - 1, size_t{4} * (random() % 8));
        const auto from = said.begin() + static_cast<long>(place);
        switch (random() % 5) {
            case 0: said[at] ^= static_cast<uint8_t>(1 << random() % 8); break;
            case 1: {
                const uint64_t value = values[random() % std::size(values)];
                std::memcpy(&said[at], &value, std::min(size_t{4} + 4 * (random() % 2), said.size() - at));
                break;
            }
            case 2: said.erase(from, from + static_cast<long>(std::min(left - 1, 1 + random() % 64))); break;
            case 3: {
                const Bytes again(from, from + static_cast<long>(std::min<size_t>(left, 8224)));
                said.insert(from, again.begin(), again.end());
                break;
            }
            default: {
                const Bytes more = noise(random() % 64, random());
                said.insert(from, more.begin(), more.end());
            }
        }
    }
}

void fuzz(uint64_t inputs, uint64_t seed) {
    uint64_t whole = 0, refused = 0;
    for (uint64_t input = 0; input < inputs; ++input) {
        Random random(seed * 1'000'000'007 + input);
        Bytes said = conversation(random);
        damage(said, random);
        auto first = std::make_unique<uint8_t[]>(30'000), second = std::make_unique<uint8_t[]>(100);
        Engine engine(0, 2, kSeconds, input % 2 == 1);
        auto ends = connected();
        engine.attach(1, ends[0]);
        const uint64_t operation = engine.post({}, {{1, 0, first.get(), 30'000}, {1, 1, second.get(), 100}});
        const auto split = static_cast<size_t>(random() % said.size());
        for (auto [from, until] : {std::pair<size_t, size_t>{0, split}, {split, said.size()}}) {
            while (from < until) {
                const ssize_t count = send(ends[1], said.data() + from, until - from, MSG_NOSIGNAL);
                if (count <= 0) break;  // it was refused
                from += static_cast<size_t>(count);
            }
        }
        shutdown(ends[1], SHUT_WR);
        while (engine.counts(1).connections > 0) engine.events(0.001);  // when all is read, the connection is lost
        try {
            whole += engine.wait(operation, 0);
        } catch (const std::runtime_error& error) {
            require(std::string(error.what()).rfind("rank 1 ", 0) == 0, std::string("an error names nobody: ") + error.what());
            ++refused;
        }
        close(ends[1]);
    }
    std::printf("%llu damaged conversations, %llu refused, %llu whole, no defect\n", static_cast<unsigned long long>(inputs),
                static_cast<unsigned long long>(refused), static_cast<unsigned long long>(whole));
}

}  // namespace

int main(int count, char** arguments) {
    const std::vector<std::string> words(arguments + 1, arguments + count);
    if (words.size() >= 2 && words[0] == "fuzz") {
        fuzz(std::stoull(words[1]), words.size() > 2 ? std::stoull(words[2]) : 0);
        return 0;
    }
    require(!words.empty() && words[0] == "loopback" && words.size() != 2, "expected loopback [CERTIFICATE KEY] or fuzz INPUTS [SEED]");
    loopback(false);
    loopback(true);
    is_far = true;
    loopback(false);
    is_far = false;
    if (words.size() == 3) loopback(false, words[1], words[2]);
    std::printf("two engines, %d messages%s, no defect\n", words.size() == 3 ? 640 : 480, words.size() == 3 ? ", a quarter of them encrypted" : "");
}
