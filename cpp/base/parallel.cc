#include "base/parallel.h"

#include <pthread.h>

#include <atomic>

#include "base/check.h"

namespace edgeh2o {
namespace {
std::atomic<int> g_num_threads{0};   // 0: not set, OpenMP's own default
thread_local int t_num_threads = 0;  // 0: no ThreadScope

// A child has none of the threads that its parent's next region would wake, and would wait for them for ever.
[[maybe_unused]] const int g_at_fork = pthread_atfork(
    [] {
      if (!omp_in_parallel()) release_threads();
    },
    nullptr, nullptr);
}  // namespace

void check_num_threads(int n_threads) {
  EH2O_CHECK(n_threads >= 1 && n_threads <= kMaxThreads, "threads must be between 1 and ", kMaxThreads,
             ", got ", n_threads);
}

void set_num_threads(int n_threads) {
  check_num_threads(n_threads);
  g_num_threads.store(n_threads, std::memory_order_relaxed);
}

int num_threads() {
  if (t_num_threads > 0) return t_num_threads;
  const int n_threads = g_num_threads.load(std::memory_order_relaxed);
  return n_threads > 0 ? n_threads : omp_get_max_threads();
}

ThreadScope::ThreadScope(int n_threads) : outer_(t_num_threads) { t_num_threads = n_threads; }
ThreadScope::~ThreadScope() { t_num_threads = outer_; }

void release_threads() { omp_pause_resource_all(omp_pause_soft); }

}  // namespace edgeh2o
