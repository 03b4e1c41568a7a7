// What Python sees of the engine. Tensors come as addresses: the caller keeps them until `finished` names their operation.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "engine.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace thinwire::wire;

namespace {

using Unlocked = nb::call_guard<nb::gil_scoped_release>;
using Message = std::tuple<int, uint64_t, uintptr_t, uint64_t>;  // peer, number, address, bytes

std::vector<Part> parts(const std::vector<Message>& messages) {
    std::vector<Part> all;
    for (auto [peer, number, address, bytes] : messages)
        all.push_back({peer, number, reinterpret_cast<uint8_t*>(address), bytes});
    return all;
}

}  // namespace

NB_MODULE(_engine, m) {
    m.doc() = "Messages between workers over several TCP connections a pair; `thinwire.comm.tcp` is its user.";
    nb::class_<Counts>(m, "Counts")
        .def_ro("connections", &Counts::connections)
        .def_ro("chunks", &Counts::chunks)
        .def_ro("hedged", &Counts::hedged)
        .def_ro("resent", &Counts::resent)
        .def_ro("duplicates", &Counts::duplicates)
        .def_ro("round_trip_seconds", &Counts::round_trip_seconds);
    nb::class_<Engine>(m, "Engine")
        .def(nb::init<int, int, double>(), "rank"_a, "size"_a, "timeout_seconds"_a)
        .def("attach", &Engine::attach, "peer"_a, "descriptor"_a, Unlocked())
        .def("post", [](Engine& engine, const std::vector<Message>& sends, const std::vector<Message>& receives) {
            auto ours = parts(sends), theirs = parts(receives);
            nb::gil_scoped_release release;
            return engine.post(ours, theirs);
        }, "sends"_a, "receives"_a)
        .def("wait", &Engine::wait, "operation"_a, "seconds"_a, Unlocked())
        .def("finished", &Engine::finished, Unlocked())
        .def("events", [](Engine& engine, double seconds) {
            std::vector<std::tuple<int, int, int>> all;
            nb::gil_scoped_release release;
            for (const Event& e : engine.events(seconds)) all.emplace_back(e.what, e.peer, e.number);
            return all;
        }, "seconds"_a)
        .def("lose", &Engine::lose, "peer"_a, "reason"_a, Unlocked())
        .def("close", &Engine::close, "seconds"_a, Unlocked())
        .def("counts", &Engine::counts, "peer"_a, Unlocked());
    m.attr("LOST") = static_cast<int>(Event::kLost);
    m.attr("WANT") = static_cast<int>(Event::kWant);
    m.attr("FAILED") = static_cast<int>(Event::kFailed);
}
