#include "base/parallel.h"

#include <algorithm>
#include <atomic>

#include "base/check.h"

namespace edgeh2o {
namespace {
std::atomic<int> g_num_threads{0};  // 0: not set, OpenMP's own default
thread_local int t_limit = kMaxThreads;
}  // namespace

void set_num_threads(int n_threads) {
  EH2O_CHECK(n_threads >= 1 && n_threads <= kMaxThreads, "threads must be between 1 and ", kMaxThreads,
             ", got ", n_threads);
  g_num_threads.store(n_threads, std::memory_order_relaxed);
}

int num_threads() {
  const int n_threads = g_num_threads.load(std::memory_order_relaxed);
  return std::min(n_threads > 0 ? n_threads : omp_get_max_threads(), t_limit);
}

ThreadLimit::ThreadLimit(int n_threads) : outer_(t_limit) { t_limit = std::min(t_limit, n_threads); }
ThreadLimit::~ThreadLimit() { t_limit = outer_; }

void release_threads() { omp_pause_resource_all(omp_pause_soft); }

}  // namespace edgeh2o
