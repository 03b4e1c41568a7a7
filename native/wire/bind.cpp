// What Python sees of the engine. Tensors come as addresses: the caller keeps them until `finished` names their operation.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <poll.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <thread>

#include "engine.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace thinwire::wire;

namespace {

// Lets other threads run Python meanwhile. A thread that comes back after `end` stays here: if it asked for the GIL while
// Python finalizes, that would end the thread, through destructors that may not throw, and so abort the process.
class Released {
  public:
    Released() : state_(PyEval_SaveThread()) {}
    Released(const Released&) = delete;
    ~Released() {
        ++coming_back;
        if (is_ending && !is_main_thread()) {
            --coming_back;
            while (true) ::pause();
        }
        PyEval_RestoreThread(state_);
        --coming_back;
    }

    // Keeps threads here from now on, and waits for those that are about to have the GIL.
    static void end() {
        is_ending = true;
        Released release;
        for (int i = 0; i < 1000 && coming_back > 0; ++i) // a second: in a fork, some have not come with it
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }

  private:
    static inline std::atomic<bool> is_ending{false};
    static inline std::atomic<int> coming_back{0};

    static bool is_main_thread() {
#ifdef __APPLE__
        return pthread_main_np() != 0;
#else
        return ::getpid() == static_cast<pid_t>(::syscall(SYS_gettid));
#endif
    }

    PyThreadState* state_;
};

using Unlocked = nb::call_guard<Released>;
using Message = std::tuple<int, uint64_t, uintptr_t, uint64_t>;  // peer, number, address, bytes

std::vector<Part> parts(const std::vector<Message>& messages) {
    std::vector<Part> all;
    for (auto [peer, number, address, bytes] : messages)
        all.push_back({peer, number, reinterpret_cast<uint8_t*>(address), bytes});
    return all;
}

// A session before the engine has it: `recv` and `sendall` of a Python socket, with its time limits and its errors.
struct Stream {
    std::shared_ptr<Session> session;
    double seconds = 0;  // 0: never waits

    // Repeats `step` until it does not ask to wait for the socket. Needs the GIL.
    template <typename Step>
    ssize_t until_done(Step step, bool reads) {
        auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
        while (true) {
            ssize_t count;
            int error;
            bool is_late = false;
            {
                Released release;
                count = step();
                error = count < 0 ? errno : 0;
                if (error == EAGAIN && seconds > 0) {
                    std::chrono::duration<double, std::milli> left = until - std::chrono::steady_clock::now();
                    is_late = left.count() <= 0;
                    const bool writes = session->pending() > 0;
                    short events = static_cast<short>((reads || !writes ? POLLIN : 0) | (writes ? POLLOUT : 0));
                    pollfd ready{session->descriptor(), events, 0};
                    if (!is_late) ::poll(&ready, 1, static_cast<int>(left.count()) + 1);
                }
            }
            if (error == 0) return count;
            if (error == EPROTO) {
                PyErr_SetString(PyExc_ConnectionError, session->error().c_str());
            } else if (error != EAGAIN) {
                errno = error;
                PyErr_SetFromErrno(PyExc_OSError);  // a ConnectionResetError, where the peer has hung up
            } else if (seconds <= 0) {
                PyErr_SetString(PyExc_BlockingIOError, "the socket has to be waited for");
            } else if (is_late) {
                PyErr_SetString(PyExc_TimeoutError, "timed out");
            } else {
                continue;
            }
            throw nb::python_error();
        }
    }

    nb::bytes recv(size_t size) {
        std::string bytes(size, '\0');
        iovec piece{bytes.data(), size};
        ssize_t count = until_done([&] { return session->receive(&piece, 1); }, true);
        return nb::bytes(bytes.data(), static_cast<size_t>(count));
    }

    // Without a time limit, what the socket does not take at once waits for the next call; it is short then.
    void sendall(nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> bytes) {
        iovec piece{const_cast<uint8_t*>(bytes.data()), bytes.size()};
        do {
            auto count = static_cast<size_t>(until_done([&] { return session->send(&piece, 1); }, false));
            piece.iov_base = static_cast<uint8_t*>(piece.iov_base) + count;
            piece.iov_len -= count;
        } while (seconds > 0 && (piece.iov_len > 0 || session->pending() > 0));
    }
};

}  // namespace

NB_MODULE(_engine, m) {
    m.doc() = "Messages between workers over several TCP connections a pair; `thinwire.comm.tcp` is its user.";
    nb::set_leak_warnings(false);  // a script may end with its process groups open
    nb::class_<Counts>(m, "Counts")
        .def_ro("connections", &Counts::connections)
        .def_ro("chunks", &Counts::chunks)
        .def_ro("hedged", &Counts::hedged)
        .def_ro("resent", &Counts::resent)
        .def_ro("duplicates", &Counts::duplicates)
        .def_ro("round_trip_seconds", &Counts::round_trip_seconds);
    nb::class_<Context>(m, "Context")
        .def(nb::init<const std::string&, const std::string&, const std::string&, const std::string&, uint64_t>(),
             "certificate"_a, "key"_a, "authority"_a, "revoked"_a = "", "records_per_key"_a = uint64_t{1} << 23)
        .def_prop_ro("name", &Context::name);
    nb::class_<Stream>(m, "Session")
        .def("__init__", [](Stream* self, const Context& context, int descriptor, bool accepts) {
            new (self) Stream{std::make_shared<Session>(context, descriptor, accepts)};
        }, "context"_a, "descriptor"_a, "accepts"_a)
        .def("settimeout", [](Stream& stream, double seconds) { stream.seconds = seconds; }, "seconds"_a)
        .def("recv", &Stream::recv, "size"_a)
        .def("sendall", &Stream::sendall, "data"_a, nb::sig("def sendall(self, data: bytes | memoryview) -> None"))
        .def_prop_ro("peer_name", [](const Stream& stream) { return stream.session->peer_name(); })
        .def_prop_ro("renewals", [](const Stream& stream) { return stream.session->renewals(); });
    nb::class_<Engine>(m, "Engine")
        .def(nb::init<int, int, double, bool, uint64_t>(), "rank"_a, "size"_a, "timeout_seconds"_a, "is_channel"_a = false,
             "early_bytes"_a = kEarly)
        .def("attach", [](Engine& engine, int peer, int descriptor, const Stream* stream) {
            auto session = stream ? stream->session : nullptr;
            Released release;
            engine.attach(peer, descriptor, std::move(session));
        }, "peer"_a, "descriptor"_a, "session"_a = nb::none())
        .def("post", [](Engine& engine, const std::vector<Message>& sends, const std::vector<Message>& receives) {
            auto ours = parts(sends), theirs = parts(receives);
            Released release;
            return engine.post(ours, theirs);
        }, "sends"_a, "receives"_a)
        .def("wait", &Engine::wait, "operation"_a, "seconds"_a, Unlocked())
        .def("begun", &Engine::begun, "messages"_a, "seconds"_a, Unlocked())
        .def("first", &Engine::first, "operations"_a, "seconds"_a, Unlocked())
        .def("interrupt", &Engine::interrupt, Unlocked())
        .def("finished", &Engine::finished, Unlocked())
        .def("events", [](Engine& engine, double seconds) {
            std::vector<std::tuple<int, int, int>> all;
            Released release;
            for (const Event& e : engine.events(seconds)) all.emplace_back(e.what, e.peer, e.number);
            return all;
        }, "seconds"_a)
        .def("cut", &Engine::cut, Unlocked())
        .def("connects", &Engine::connects, "peer"_a, "is_mine"_a, Unlocked())
        .def("lose", &Engine::lose, "peer"_a, "reason"_a, Unlocked())
        .def("drained", &Engine::drained, "seconds"_a, Unlocked())
        .def("close", &Engine::close, "seconds"_a, Unlocked())
        .def("counts", &Engine::counts, "peer"_a, Unlocked());
    m.def("end_threads", &Released::end, "Keep threads that come back in C++ from now on: the process ends.");
    m.attr("STREAM_SHIFT") = kStreamShift;
    m.attr("LOST") = static_cast<int>(Event::kLost);
    m.attr("ENDED") = static_cast<int>(Event::kEnded);
    m.attr("RESET") = static_cast<int>(Event::kReset);
    m.attr("WANT") = static_cast<int>(Event::kWant);
    m.attr("GONE") = static_cast<int>(Event::kGone);
    m.attr("FAILED") = static_cast<int>(Event::kFailed);
}
