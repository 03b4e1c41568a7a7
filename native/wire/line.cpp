#include "line.hpp"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>

#ifdef __linux__
#include <linux/sockios.h>
#endif

namespace thinwire::wire {

// The layout is that of linux/tcp.h, which the C library's header lacks in part.
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

void set_option(int fd, int level, int option, int value) { setsockopt(fd, level, option, &value, sizeof value); }

bool choose_control(int fd, const char* name) {
#ifdef TCP_CONGESTION
    return setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, static_cast<socklen_t>(std::strlen(name))) == 0;
#else
    (void)fd, (void)name;
    return false;
#endif
}

}  // namespace thinwire::wire
