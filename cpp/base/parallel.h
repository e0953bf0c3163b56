// The only home of OpenMP. Tasks are handed out dynamically: which thread runs a task never changes its
// result, because a task writes only its own outputs and every reduction has a fixed order.
#pragma once

#include <omp.h>

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

// Calls f(task, thread) for every task in [0, n_tasks); thread < num_threads(). f must not throw.
template <typename F>
void parallel_for(size_t n_tasks, const F& f) {
  const int n_threads = num_threads();
  if (n_tasks <= 1 || n_threads == 1) {
    for (size_t task = 0; task < n_tasks; ++task) f(task, size_t{0});
    return;
  }
#pragma omp parallel for schedule(dynamic, 1) num_threads(n_threads)
  for (size_t task = 0; task < n_tasks; ++task) {
    f(task, static_cast<size_t>(omp_get_thread_num()));
  }
}

}  // namespace edgeh2o
