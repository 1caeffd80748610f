// Threads for the kernels. Work is cut into small tasks, and each thread takes one when it is free. If another program has taken a thread's
// core, the other threads do its share, and nobody waits for it.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>

#define EXPORT extern "C" __attribute__((visibility("default")))  // a function that Python calls

class Tasks {
   public:
    explicit Tasks(int64_t count) : count_(count) {}
    // Returns the number of a task that nobody has taken, or -1.
    int64_t take() {
        const int64_t task = next_.fetch_add(1, std::memory_order_relaxed);
        return task < count_ ? task : -1;
    }

   private:
    std::atomic<int64_t> next_{0};
    const int64_t count_;
};

struct Job {
    void (*run)(const void* body, Tasks& tasks);
    const void* body;
    Tasks* tasks;
};
// Runs the job here and in up to `threads` - 1 other threads; returns when all of its tasks are done.
void run_job(const Job& job, int64_t threads);

// Calls body(tasks) here and in other threads; each takes tasks until none is left.
template <class Body>
void in_parallel(int64_t count, int64_t threads, const Body& body) {
    Tasks tasks(count);
    threads = std::min(threads, count);
    if (threads <= 1) return body(tasks);
    run_job({[](const void* b, Tasks& t) { (*static_cast<const Body*>(b))(t); }, &body, &tasks}, threads);
}

constexpr int64_t MIN_ELEMENTS = 4096;  // elements that are worth a thread

// The threads for work on so many elements.
inline int threads_for(int64_t elements, int64_t threads) {
    return int(std::max<int64_t>(1, std::min(threads, elements / MIN_ELEMENTS)));
}

// Calls body(i) for each i below `count`, with neighbours in one task, in up to `threads` threads.
template <class Body>
void for_each(int64_t count, int64_t threads, const Body& body) {
    const int64_t pieces = threads <= 1 ? 1 : std::min(count, 4 * threads);
    in_parallel(pieces, threads, [&](Tasks& tasks) {
        for (int64_t piece; (piece = tasks.take()) >= 0;)
            for (int64_t i = count * piece / pieces; i < count * (piece + 1) / pieces; i++) body(i);
    });
}
