// The only home of OpenMP. Tasks are handed out dynamically: which thread runs a task never changes its
// result, because a task writes only its own outputs and every reduction has a fixed order.
#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <exception>

namespace edgeh2o {

// Throws std::invalid_argument unless 1 <= n_threads <= kMaxThreads.
void check_num_threads(int n_threads);
void set_num_threads(int n_threads);  // of calls without a ThreadScope
int num_threads();                    // what a ThreadScope of this thread says, else what is set
inline constexpr int kMaxThreads = 256;

// As long as it lives, parallel_for of the thread that made it takes n_threads.
class ThreadScope {
 public:
  explicit ThreadScope(int n_threads);
  ~ThreadScope();
  ThreadScope(const ThreadScope&) = delete;
  ThreadScope& operator=(const ThreadScope&) = delete;

 private:
  int outer_;
};

// Ends the threads that wait for the next parallel_for, which makes new ones. Waiting threads spin at first
// (libgomp: for 15 ms on some machines), in the way of another runtime's threads.
void release_threads();

// Calls f(thread) on each of n_threads; thread < n_threads. f must not throw.
template <typename F>
void run_threads(int n_threads, const F& f) {
#pragma omp parallel num_threads(n_threads)
  f(static_cast<size_t>(omp_get_thread_num()));
}

// Calls f(task, thread) for every task in [0, n_tasks); thread < num_threads(). f must not throw.
// A counter of our own costs 0.3 us a call less than OpenMP's dynamic schedule (1.1 us, 2 threads).
template <typename F>
void parallel_for(size_t n_tasks, const F& f) {
  const int n_threads = num_threads();
  if (n_tasks <= 1 || n_threads == 1) {
    for (size_t task = 0; task < n_tasks; ++task) f(task, size_t{0});
    return;
  }
  std::atomic<size_t> next{0};
  run_threads(n_threads, [&](size_t thread) {
    for (size_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < n_tasks;) f(task, thread);
  });
}

// Calls f(first, end, thread) for ranges of items that together are [0, n_items), as long at first as
// neighbours are worth reading together, and ever shorter, so that all threads end at about the same time:
// 60 short items in eight equal tasks leave one of two threads idle for a seventh of the time. f must not
// throw, and what it does for an item may not depend on the range.
template <typename F>
void parallel_ranges(size_t n_items, const F& f) {
  const int n_threads = num_threads();
  if (n_items <= 1 || n_threads == 1) {
    if (n_items > 0) f(size_t{0}, n_items, size_t{0});
    return;
  }
  constexpr size_t kShare = 2;  // a range is this part of a thread's share of what is left
  const size_t n_parts = kShare * static_cast<size_t>(n_threads);
  std::atomic<size_t> next{0};
  run_threads(n_threads, [&](size_t thread) {
    size_t first = next.load(std::memory_order_relaxed);
    while (first < n_items) {
      const size_t end = first + std::max<size_t>(1, (n_items - first) / n_parts);
      if (!next.compare_exchange_weak(first, end, std::memory_order_relaxed)) continue;
      f(first, end, thread);
      first = next.load(std::memory_order_relaxed);
    }
  });
}

}  // namespace edgeh2o
