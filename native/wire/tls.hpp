// TLS 1.3 on a connected socket, by OpenSSL 3, which is loaded when it is first used.
//
// A session has two mouths: towards the socket, encrypted records; towards its user, `send` and `receive`, which are to plain
// bytes what `sendmsg` and `recvmsg` are to a socket that never waits. It is used by one thread at a time.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace thinwire::wire {

class Context {  // what a worker shows, and whom it believes
  public:
    // Paths of PEM files; `revoked` may be empty. Throws std::runtime_error that names the file.
    Context(const std::string& certificate, const std::string& key, const std::string& authority,
            const std::string& revoked, uint64_t records_per_key);
    ~Context();
    Context(const Context&) = delete;
    Context& operator=(const Context&) = delete;

    std::string name() const;  // the first of the certificate's subject alternative names

  private:
    friend class Session;
    void* context_;
    uint64_t records_per_key_;
};

class Session {
  public:
    Session(const Context& context, int descriptor, bool accepts);  // the descriptor stays the caller's
    ~Session();
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;

    // Both return a number of plain bytes; 0 at the end of the connection; -1 with errno: EAGAIN if the socket has to be
    // waited for, EPROTO if the peer did not keep to TLS or was refused. They make the handshake where it is still due.
    ssize_t send(const iovec* pieces, int count);
    ssize_t receive(const iovec* pieces, int count, bool from_socket = true);

    size_t pending() const { return sealed_.size() - sent_; }  // encrypted bytes that wait for the socket
    bool is_broken() const { return !error_.empty(); }
    const std::string& error() const { return error_; }
    int descriptor() const { return descriptor_; }
    uint64_t renewals() const { return renewals_; }
    std::string peer_name() const;  // as in the certificate that the peer has shown; empty before the handshake

  private:
    struct Socket;

    bool open();
    bool push();
    bool seal(const uint8_t* bytes, size_t count);
    ssize_t broken();

    void* session_;
    const int descriptor_;
    const uint64_t records_per_key_;
    uint64_t records_ = 0, renewals_ = 0;
    bool is_open_ = false, has_ended_ = false;
    std::string error_;
    std::vector<uint8_t> sealed_;              // encrypted, for the socket
    size_t sent_ = 0;                          // of these
    std::unique_ptr<uint8_t[]> plain_;         // of a record that is gathered from several pieces
    bool reads_ = true;                        // whether OpenSSL may read from the socket now
    int read_error_ = 0;                       // errno of when it last could not
};

}  // namespace thinwire::wire
