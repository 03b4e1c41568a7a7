#include "tls.hpp"

#include <dlfcn.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <type_traits>
#include <utility>

namespace thinwire::wire {

namespace {

#ifdef __APPLE__
constexpr char kLibrary[] = "libssl.3.dylib";
#else
constexpr char kLibrary[] = "libssl.so.3";
#endif

constexpr size_t kRecord = 1 << 14;  // plain bytes, the most that TLS allows
constexpr size_t kRead = 1 << 16;    // encrypted bytes that are taken from the socket at once; OpenSSL keeps them
constexpr size_t kSealed = 1 << 17;  // encrypted bytes that are handed to the socket at once

// The functions of OpenSSL that are used here, as its manual declares them. Pointers to its own types are `void*`.
#define THINWIRE_OPENSSL(F)                                                                  \
    F(void*, TLS_method, (void))                                                             \
    F(void*, SSL_CTX_new, (void*))                                                           \
    F(void, SSL_CTX_free, (void*))                                                           \
    F(long, SSL_CTX_ctrl, (void*, int, long, void*))                                         \
    F(int, SSL_CTX_set_num_tickets, (void*, size_t))                                         \
    F(void, SSL_CTX_set_default_read_buffer_len, (void*, size_t))                            \
    F(int, SSL_CTX_set_ciphersuites, (void*, const char*))                                   \
    F(int, SSL_CTX_use_certificate_chain_file, (void*, const char*))                         \
    F(int, SSL_CTX_use_PrivateKey_file, (void*, const char*, int))                           \
    F(int, SSL_CTX_load_verify_locations, (void*, const char*, const char*))                 \
    F(void, SSL_CTX_set_verify, (void*, int, void*))                                         \
    F(void*, SSL_CTX_get0_param, (void*))                                                    \
    F(void*, SSL_CTX_get0_certificate, (const void*))                                        \
    F(int, X509_VERIFY_PARAM_set_flags, (void*, unsigned long))                              \
    F(void*, SSL_new, (void*))                                                               \
    F(void, SSL_free, (void*))                                                               \
    F(void, SSL_set_bio, (void*, void*, void*))                                              \
    F(void, SSL_set_accept_state, (void*))                                                   \
    F(void, SSL_set_connect_state, (void*))                                                  \
    F(int, SSL_do_handshake, (void*))                                                        \
    F(int, SSL_read, (void*, void*, int))                                                    \
    F(int, SSL_write, (void*, const void*, int))                                             \
    F(int, SSL_get_error, (const void*, int))                                                \
    F(int, SSL_key_update, (void*, int))                                                     \
    F(long, SSL_get_verify_result, (const void*))                                            \
    F(void*, SSL_get1_peer_certificate, (const void*))                                       \
    F(void*, BIO_meth_new, (int, const char*))                                               \
    F(int, BIO_meth_set_write, (void*, int (*)(void*, const char*, int)))                    \
    F(int, BIO_meth_set_read, (void*, int (*)(void*, char*, int)))                           \
    F(int, BIO_meth_set_ctrl, (void*, long (*)(void*, int, long, void*)))                    \
    F(void*, BIO_new, (const void*))                                                         \
    F(void, BIO_set_data, (void*, void*))                                                    \
    F(void*, BIO_get_data, (void*))                                                          \
    F(void, BIO_set_init, (void*, int))                                                      \
    F(void, BIO_set_flags, (void*, int))                                                     \
    F(void, BIO_clear_flags, (void*, int))                                                   \
    F(void, X509_free, (void*))                                                              \
    F(void*, X509_get_ext_d2i, (const void*, int, int*, int*))                               \
    F(const char*, X509_verify_cert_error_string, (long))                                    \
    F(int, OPENSSL_sk_num, (const void*))                                                    \
    F(void*, OPENSSL_sk_value, (const void*, int))                                           \
    F(void*, GENERAL_NAME_get0_value, (const void*, int*))                                   \
    F(void, GENERAL_NAMES_free, (void*))                                                     \
    F(const unsigned char*, ASN1_STRING_get0_data, (const void*))                            \
    F(int, ASN1_STRING_length, (const void*))                                                \
    F(unsigned long, ERR_get_error, (void))                                                  \
    F(void, ERR_clear_error, (void))                                                         \
    F(const char*, ERR_reason_error_string, (unsigned long))

// Its constants.
constexpr int kSetMinVersion = 123, kSetSessionCache = 44, kSetReadAhead = 41, kTls13 = 0x304, kPem = 1;
constexpr int kVerifyPeer = 1, kFailWithoutPeer = 2;
constexpr unsigned long kCheckRevoked = 4;
constexpr int kWantRead = 2, kZeroReturn = 6, kUpdateOwnKey = 0;
constexpr int kSourceSink = 0x400, kAllFlags = 0x0f, kRetryRead = 0x09, kFlush = 11;
constexpr int kAlternativeNames = 85, kEmail = 1, kDns = 2, kUri = 6;

struct Library {
#define THINWIRE_DECLARE(result, name, arguments) result(*name) arguments = nullptr;
    THINWIRE_OPENSSL(THINWIRE_DECLARE)
#undef THINWIRE_DECLARE

    Library() {
        void* handle = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
        if (!handle)
            throw std::runtime_error(std::string("credentials need OpenSSL 3, and ") + kLibrary +
                                     " was not found; install it (Debian and Ubuntu: apt install libssl3; Fedora: dnf "
                                     "install openssl-libs; macOS: brew install openssl@3)");
        auto find = [&](auto& function, const char* name) {  // in libcrypto too, which it depends on
            function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(handle, name));
            if (!function) throw std::runtime_error(std::string(kLibrary) + " has no " + name + "; install OpenSSL 3.0 or later");
        };
#define THINWIRE_FIND(result, name, arguments) find(name, #name);
        THINWIRE_OPENSSL(THINWIRE_FIND)
#undef THINWIRE_FIND
    }
};

const Library& openssl() {
    static const Library library;
    return library;
}

std::string last_error() {
    unsigned long code = openssl().ERR_get_error();
    const char* reason = code ? openssl().ERR_reason_error_string(code) : nullptr;
    return reason ? reason : "no reason given";
}

std::string name_in(const void* certificate) {
    const Library& o = openssl();
    void* names = certificate ? o.X509_get_ext_d2i(certificate, kAlternativeNames, nullptr, nullptr) : nullptr;
    std::string found;
    for (int i = 0; names && found.empty() && i < o.OPENSSL_sk_num(names); ++i) {
        int kind = 0;
        const void* value = o.GENERAL_NAME_get0_value(o.OPENSSL_sk_value(names, i), &kind);
        if (kind == kEmail || kind == kDns || kind == kUri)
            found.assign(reinterpret_cast<const char*>(o.ASN1_STRING_get0_data(value)),
                         static_cast<size_t>(o.ASN1_STRING_length(value)));
    }
    if (names) o.GENERAL_NAMES_free(names);
    return found;
}

}  // namespace

// What OpenSSL takes for the socket: it reads from the socket itself, and writes into a session's buffer.
struct Session::Socket {
    static int write(void* bio, const char* bytes, int count) {
        auto session = static_cast<Session*>(openssl().BIO_get_data(bio));
        auto first = reinterpret_cast<const uint8_t*>(bytes);
        session->sealed_.insert(session->sealed_.end(), first, first + count);
        return count;
    }

    static int read(void* bio, char* bytes, int count) {
        auto session = static_cast<Session*>(openssl().BIO_get_data(bio));
        openssl().BIO_clear_flags(bio, kAllFlags);
        ssize_t got = -1;
        errno = EAGAIN;
        while (session->reads_ && (got = ::recv(session->descriptor_, bytes, static_cast<size_t>(count), MSG_DONTWAIT)) < 0 &&
               errno == EINTR) {
        }
        if (got > 0) return static_cast<int>(got);
        session->read_error_ = errno;
        session->has_ended_ = session->has_ended_ || got == 0;
        return openssl().BIO_set_flags(bio, kRetryRead), -1;  // an error of the socket is none of TLS
    }

    static long control(void*, int what, long, void*) { return what == kFlush; }

    static const void* method() {
        static const void* made = [] {
            const Library& o = openssl();
            void* method = o.BIO_meth_new(kSourceSink, "thinwire");
            o.BIO_meth_set_write(method, write);
            o.BIO_meth_set_read(method, read);
            o.BIO_meth_set_ctrl(method, control);
            return method;
        }();
        return made;
    }
};

Context::Context(const std::string& certificate, const std::string& key, const std::string& authority,
                 const std::string& revoked, uint64_t records_per_key)
    : records_per_key_(records_per_key) {
    const Library& o = openssl();
    o.ERR_clear_error();
    std::unique_ptr<void, void (*)(void*)> made(o.SSL_CTX_new(o.TLS_method()), o.SSL_CTX_free);
    if (!made) throw std::runtime_error("OpenSSL makes no context: " + last_error());
    auto check = [](int done, const char* what, const std::string& path) {
        if (done != 1) throw std::runtime_error(std::string("cannot read ") + what + " in " + path + ": " + last_error());
    };
    void* context = made.get();
    o.SSL_CTX_ctrl(context, kSetMinVersion, kTls13, nullptr);
    o.SSL_CTX_ctrl(context, kSetSessionCache, 0, nullptr);
    o.SSL_CTX_set_num_tickets(context, 0);
    o.SSL_CTX_ctrl(context, kSetReadAhead, 1, nullptr);
    o.SSL_CTX_set_default_read_buffer_len(context, kRead);
    o.SSL_CTX_set_ciphersuites(context, "TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256");
    check(o.SSL_CTX_use_certificate_chain_file(context, certificate.c_str()), "a certificate", certificate);
    check(o.SSL_CTX_use_PrivateKey_file(context, key.c_str(), kPem), "the certificate's key", key);
    check(o.SSL_CTX_load_verify_locations(context, authority.c_str(), nullptr), "the authority's certificate", authority);
    if (!revoked.empty()) {
        check(o.SSL_CTX_load_verify_locations(context, revoked.c_str(), nullptr), "the revoked certificates", revoked);
        o.X509_VERIFY_PARAM_set_flags(o.SSL_CTX_get0_param(context), kCheckRevoked);
    }
    o.SSL_CTX_set_verify(context, kVerifyPeer | kFailWithoutPeer, nullptr);
    context_ = made.release();
}

Context::~Context() { openssl().SSL_CTX_free(context_); }

std::string Context::name() const { return name_in(openssl().SSL_CTX_get0_certificate(context_)); }

Session::Session(const Context& context, int descriptor, bool accepts)
    : session_(openssl().SSL_new(context.context_)), descriptor_(descriptor), records_per_key_(context.records_per_key_) {
    const Library& o = openssl();
    if (!session_) throw std::runtime_error("OpenSSL makes no session: " + last_error());
    void* bio = o.BIO_new(Socket::method());
    o.BIO_set_data(bio, this);
    o.BIO_set_init(bio, 1);
    o.SSL_set_bio(session_, bio, bio);
    accepts ? o.SSL_set_accept_state(session_) : o.SSL_set_connect_state(session_);
    plain_.reset(new uint8_t[kRecord]);
}

Session::~Session() { openssl().SSL_free(session_); }

std::string Session::peer_name() const {
    void* certificate = openssl().SSL_get1_peer_certificate(session_);
    std::string name = name_in(certificate);
    if (certificate) openssl().X509_free(certificate);
    return name;
}

ssize_t Session::send(const iovec* pieces, int count) {
    if (!push()) return -1;
    reads_ = true;
    if (!open()) {
        if (has_ended_ && error_.empty()) errno = ECONNRESET;
        return -1;
    }
    size_t taken = 0, filled = 0;
    for (int i = 0; i < count; ++i) {
        auto from = static_cast<const uint8_t*>(pieces[i].iov_base);
        for (size_t left = pieces[i].iov_len; left > 0;) {
            size_t size;
            if (left >= kRecord) {  // straight from where it is
                if (filled && !seal(plain_.get(), std::exchange(filled, 0))) return -1;
                size = kRecord;
                if (!seal(from, size)) return -1;
            } else {
                size = std::min(left, kRecord - filled);
                std::memcpy(plain_.get() + filled, from, size);
                filled += size;
                if (filled == kRecord && !seal(plain_.get(), std::exchange(filled, 0))) return -1;
            }
            from += size, left -= size, taken += size;
            if (filled == 0 && pending() >= kSealed && !push()) return errno == EAGAIN ? static_cast<ssize_t>(taken) : -1;
        }
    }
    if (filled && !seal(plain_.get(), filled)) return -1;
    return push() || errno == EAGAIN ? static_cast<ssize_t>(taken) : -1;
}

ssize_t Session::receive(const iovec* pieces, int count, bool from_socket) {
    const Library& o = openssl();
    reads_ = from_socket;
    if (!open()) return has_ended_ ? 0 : -1;
    size_t taken = 0;
    for (int i = 0; i < count; ++i) {
        for (size_t at = 0; at < pieces[i].iov_len;) {
            o.ERR_clear_error();
            size_t room = std::min<size_t>(pieces[i].iov_len - at, 1 << 30);
            int got = o.SSL_read(session_, static_cast<uint8_t*>(pieces[i].iov_base) + at, static_cast<int>(room));
            if (got > 0) {
                at += static_cast<size_t>(got), taken += static_cast<size_t>(got);
                continue;
            }
            int why = o.SSL_get_error(session_, got);
            if (why == kZeroReturn) has_ended_ = true;
            if (why != kWantRead && why != kZeroReturn) broken();
            if (why == kWantRead) errno = read_error_;
            return taken ? static_cast<ssize_t>(taken) : has_ended_ ? 0 : -1;
        }
    }
    return static_cast<ssize_t>(taken);
}

// Makes the handshake, as far as the socket allows; returns whether it is done.
bool Session::open() {
    const Library& o = openssl();
    if (is_open_) return true;
    if (!error_.empty()) return errno = EPROTO, false;
    o.ERR_clear_error();
    int done = o.SSL_do_handshake(session_), why = done == 1 ? 0 : o.SSL_get_error(session_, done);
    if (why != 0 && why != kWantRead) {
        long refused = o.SSL_get_verify_result(session_);
        error_ = refused ? o.X509_verify_cert_error_string(refused) : last_error();
    }
    bool is_sent = push();  // also what tells the peer why
    if (!error_.empty()) return errno = EPROTO, false;
    if (done == 1) return is_open_ = true;
    if (is_sent || errno == EAGAIN) errno = read_error_;
    return false;
}

// Gives encrypted bytes to the socket; false if it does not take them all now, with errno.
bool Session::push() {
    while (sent_ < sealed_.size()) {
        ssize_t count = ::send(descriptor_, sealed_.data() + sent_, sealed_.size() - sent_, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (count < 0 && errno == EINTR) continue;
        if (count < 0 && errno == EWOULDBLOCK) errno = EAGAIN;
        if (count < 0) return false;
        sent_ += static_cast<size_t>(count);
    }
    sealed_.clear();
    sent_ = 0;
    return true;
}

// Encrypts one record. A key must not encrypt more than 2^24.5 records (RFC 8446, section 5.5).
bool Session::seal(const uint8_t* bytes, size_t count) {
    const Library& o = openssl();
    o.ERR_clear_error();
    if (++records_ > records_per_key_) {
        if (o.SSL_key_update(session_, kUpdateOwnKey) != 1) return broken(), false;
        records_ = 1;
        ++renewals_;
    }
    if (o.SSL_write(session_, bytes, static_cast<int>(count)) != static_cast<int>(count)) return broken(), false;
    return true;
}

ssize_t Session::broken() {
    if (error_.empty()) error_ = last_error();
    errno = EPROTO;
    return -1;
}

}  // namespace thinwire::wire
