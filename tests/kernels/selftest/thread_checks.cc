#include "tests/kernels/selftest/thread_checks.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <vector>

#include "base/parallel.h"

namespace edgeh2o::selftest {
namespace {

class Turns {
 public:
  Turns(size_t n_items, int n_threads) : counts_(n_items), n_threads_(n_threads) {}
  void take(size_t first, size_t end, size_t thread) {
    if (thread >= static_cast<size_t>(n_threads_) || first >= end || end > counts_.size()) is_wrong_ = true;
    for (size_t i = first; i < std::min(end, counts_.size()); ++i) ++counts_[i];
  }
  bool is_once_each() const {
    const auto is_once = [](const std::atomic<int>& count) { return count == 1; };
    return !is_wrong_ && std::all_of(counts_.begin(), counts_.end(), is_once);
  }

 private:
  std::vector<std::atomic<int>> counts_;
  int n_threads_;
  std::atomic<bool> is_wrong_{false};
};

}  // namespace

bool check_threads() {
  bool ok = true;
  for (int n_threads = 1; n_threads <= 5; ++n_threads) {
    const ThreadScope scope(n_threads);
    for (const size_t n_items : {0, 1, 2, 3, 7, 8, 36, 60, 1000}) {
      Turns tasks(n_items, n_threads), ranges(n_items, n_threads);
      parallel_for(n_items, [&](size_t task, size_t thread) { tasks.take(task, task + 1, thread); });
      parallel_ranges(n_items,
                      [&](size_t first, size_t end, size_t thread) { ranges.take(first, end, thread); });
      const bool is_right = tasks.is_once_each() && ranges.is_once_each();
      if (!is_right) std::printf("%zu items on %d threads have not had one turn each\n", n_items, n_threads);
      ok &= is_right;
    }
  }
  return ok;
}

}  // namespace edgeh2o::selftest
