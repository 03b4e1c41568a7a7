// What the kernel knows of a TCP connection, and what it is told.
#pragma once

#include <cstdint>

namespace thinwire::wire {

struct Info {
    double round_trip = 0, variation = 0, least_round_trip = 0;
    uint32_t packet = 1448;
    int64_t room = 1 << 20;  // packets that may leave now
    uint64_t unacked = 0;    // bytes that the other kernel does not have
    int64_t on_the_way = 0;  // packets that have left, and that it has not acknowledged
    int64_t delivered = -1;  // packets that it has, in any order; -1: unknown
};

Info info_of(int fd);
void set_option(int fd, int level, int option, int value);  // what a system does not have, it does without

// Chooses the congestion control; false if the system has not got it, or does not allow it.
bool choose_control(int fd, const char* name);

}  // namespace thinwire::wire
