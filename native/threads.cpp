// A pool of threads that sleep between calls. It serves one call at a time: a caller that finds it busy works alone, so
// callers never wait for each other. The threads are never ended: at the exit of the process they sleep.
#include "threads.hpp"

#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>

#if !defined(_WIN32)
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#endif

namespace thinwire {

namespace {

// The work of one call, and how far its threads have come.
struct Job {
    const std::function<void(size_t)>* work;
    size_t count;
    std::atomic<size_t> next{0};
    std::atomic<bool> failed{false};
    std::exception_ptr error{};

    void run() {
        try {
            for (size_t i = next++; i < count && !failed; i = next++) (*work)(i);
        } catch (...) {
            if (!failed.exchange(true)) error = std::current_exception();
        }
    }
};

class Pool {
  public:
    // Runs the job in this thread and up to `helpers` others; returns false if they are at work.
    bool try_run(Job& job, size_t helpers) {
        if (busy_.exchange(true)) return false;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            grow(helpers);
            keep_away();
            job_ = &job, wanted_ = std::min(helpers, size_);
        }
        wake_.notify_all();
        job.run();
        {
            std::unique_lock<std::mutex> lock(mutex_);
            job_ = nullptr;  // a thread that wakes only now finds nothing to do
            ended_.wait(lock, [this] { return active_ == 0; });
        }
        busy_ = false;
        return true;
    }

  private:
    // Starts threads until there are `wanted`, or the system has no more.
    void grow(size_t wanted) try {
        for (; size_ < wanted; ++size_) start();
    } catch (const std::system_error&) {
    }

    // Linux may wake a thread on the caller's core though another is idle, and leave it there for the whole call. So the
    // threads may use every core of the caller but the one that it runs on.
    void keep_away() {
#if defined(__linux__)
        const int here = sched_getcpu();
        if (here == avoided_ && placed_ == size_) return;
        cpu_set_t cores;
        if (here < 0 || sched_getaffinity(0, sizeof cores, &cores) != 0) return;
        CPU_CLR(here, &cores);
        if (CPU_COUNT(&cores) == 0) return;
        for (const pthread_t thread : threads_) pthread_setaffinity_np(thread, sizeof cores, &cores);
        avoided_ = here, placed_ = size_;
#endif
    }

    void start() {
#if defined(_WIN32)
        std::thread([this] { help(); }).detach();
#else
        sigset_t all, before;  // signals are for the program's own threads
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        try {
            std::thread thread([this] { help(); });
            threads_.push_back(thread.native_handle());
            thread.detach();
        } catch (...) {
            pthread_sigmask(SIG_SETMASK, &before, nullptr);
            throw;
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
#endif
    }

    void help() {
#if defined(__linux__)
        pthread_setname_np(pthread_self(), "thinwire-kernel");
#endif
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            wake_.wait(lock, [this] { return job_ && wanted_ > 0; });
            Job* job = job_;
            --wanted_, ++active_;
            lock.unlock();
            job->run();
            lock.lock();
            if (--active_ == 0) ended_.notify_one();
        }
    }

    std::atomic<bool> busy_{false};
    std::mutex mutex_;  // of all below
    std::condition_variable wake_, ended_;
    Job* job_ = nullptr;
    size_t size_ = 0, wanted_ = 0, active_ = 0;
#if !defined(_WIN32)
    std::vector<pthread_t> threads_;
    size_t placed_ = 0;  // of the threads, those that avoid core `avoided_`
    int avoided_ = -1;
#endif
};

std::atomic<int> num_threads{1};

// Never deleted, because its threads use it until the process ends. A forked child has none of them, and gets a new pool.
Pool* pool = new Pool;

#if !defined(_WIN32)
const int forks = pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });
#endif

}  // namespace

void set_threads(int n) {
    require(n >= 1, "threads: expected at least 1");
    num_threads = n;
}

int threads() { return num_threads.load(std::memory_order_relaxed); }

void run_parallel(size_t count, const std::function<void(size_t)>& work) {
    Job job{&work, count};
    const size_t workers = std::min(count, static_cast<size_t>(threads()));
    if (workers <= 1 || !pool->try_run(job, workers - 1)) job.run();
    if (job.error) std::rethrow_exception(job.error);
}

}  // namespace thinwire
