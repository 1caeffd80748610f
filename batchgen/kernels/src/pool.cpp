// The threads of pool.h. A thread without work looks for some for a while, because a step's kernels follow each other within microseconds.
// Then it sleeps, because on a busy machine a spinning thread takes time from threads that have work.
#include "pool.h"

#include <pthread.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

namespace {

constexpr auto SPIN = std::chrono::microseconds(100);  // how long a thread looks for work before it sleeps
constexpr uint64_t OPEN = uint64_t(1) << 31, ROUND = uint64_t(1) << 32, BUSY = OPEN - 1;

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Returns whether `done()` becomes true within SPIN.
template <class Done>
bool spin(Done done) {
    const auto end = std::chrono::steady_clock::now() + SPIN;
    do {
        for (int i = 0; i < 32; i++) {
            if (done()) return true;
            pause();
        }
    } while (std::chrono::steady_clock::now() < end);
    return done();
}

class Pool {
   public:
    // Runs the job. Returns false, without running it, if the pool has a job of another thread.
    bool run(const Job& job, int64_t threads) {
        std::unique_lock<std::mutex> only(one_job_, std::try_to_lock);
        if (!only.owns_lock()) return false;
        try {
            for (; num_threads_ < threads - 1; num_threads_++) std::thread([this, i = num_threads_] { work(i); }).detach();
        } catch (const std::system_error&) {  // the system has no more threads for this process, so those that there are do the work
        }
        job_ = job;
        helpers_ = threads - 1;
        state_.store((state_.load() & ~(ROUND - 1)) + ROUND + OPEN);  // a new round, open, nobody busy
        if (asleep_.load()) {
            { std::lock_guard<std::mutex> lock(mutex_); }
            wake_.notify_all();
        }
        job.run(job.body, *job.tasks);
        state_.fetch_and(~OPEN);  // threads that have not begun by now are not waited for
        const auto done = [this] { return !(state_.load() & BUSY); };
        if (!spin(done)) {
            std::unique_lock<std::mutex> lock(mutex_);
            done_.wait(lock, done);
        }
        return true;
    }

   private:
    void work(int64_t number) {
        uint64_t seen = 0;
        for (;;) {
            uint64_t state = 0;
            const auto there = [&] {
                state = state_.load();
                return (state & OPEN) && state / ROUND != seen && number < helpers_.load(std::memory_order_relaxed);
            };
            if (!spin(there)) {
                std::unique_lock<std::mutex> lock(mutex_);
                asleep_++;
                wake_.wait(lock, there);
                asleep_--;
            }
            if (!state_.compare_exchange_weak(state, state + 1)) continue;
            seen = state / ROUND;
            job_.run(job_.body, *job_.tasks);
            if (((state_.fetch_sub(1) - 1) & (OPEN | BUSY)) == 0) {  // the last one; the job's thread may be waiting
                { std::lock_guard<std::mutex> lock(mutex_); }
                done_.notify_one();
            }
        }
    }

    std::mutex one_job_;
    int64_t num_threads_ = 0;
    Job job_{};
    std::atomic<int64_t> helpers_{0};
    std::atomic<uint64_t> state_{0};  // number of rounds; whether this round is open; how many threads work on it
    std::atomic<int64_t> asleep_{0};
    std::mutex mutex_;
    std::condition_variable wake_, done_;
};

Pool* pool = new Pool;  // never destroyed: its threads do not end before the process
// A forked process has none of the threads, and gets a pool of its own.
const int registered = pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });

struct Call {  // made by `Calls` in ops.py
    void (*kernel)(const void*);
    const void* argument;
};

}  // namespace

void run_job(const Job& job, int64_t threads) {
    (void)registered;
    if (!pool->run(job, threads)) job.run(job.body, *job.tasks);
}

// Several kernels in one call: no Python runs between them, so that the threads do not fall asleep.
EXPORT void batchgen_run(const Call* calls, int32_t count) {
    for (int32_t i = 0; i < count; i++) calls[i].kernel(calls[i].argument);
}
