#include "base/parallel.h"

#include <atomic>

#include "base/check.h"

namespace edgeh2o {
namespace {
std::atomic<int> g_num_threads{0};  // 0: not set, OpenMP's own default
}

void set_num_threads(int n_threads) {
  EH2O_CHECK(n_threads >= 1 && n_threads <= kMaxThreads, "threads must be between 1 and ", kMaxThreads,
             ", got ", n_threads);
  g_num_threads.store(n_threads, std::memory_order_relaxed);
}

int num_threads() {
  const int n_threads = g_num_threads.load(std::memory_order_relaxed);
  if (n_threads > 0) return n_threads;
  const int n_default = omp_get_max_threads();
  return n_default < kMaxThreads ? n_default : kMaxThreads;
}

void release_threads() { omp_pause_resource_all(omp_pause_soft); }

}  // namespace edgeh2o
