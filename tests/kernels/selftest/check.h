// Comparison of a kernel's outputs with expected values.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdio>
#include <vector>

#include "isa/kernel_table.h"

namespace edgeh2o::selftest {

constexpr float kUntouched = 12345.0f;
constexpr size_t kGuard = 32;  // elements behind an output that must stay untouched

// Collects the comparisons of one kernel of one table.
class Check {
 public:
  // Tolerance 0: equal, or both NaN.
  void near(double got, double want, double tolerance) {
    ++n_values_;
    if (got == want || (std::isnan(got) && std::isnan(want))) return;
    const double error = std::fabs(got - want);
    if (tolerance > 0 && error <= tolerance) {
      worst_ = std::fmax(worst_, error / tolerance);
    } else if (n_failures_++ == 0) {
      std::snprintf(first_failure_, sizeof(first_failure_), "value %zu is %.9g, expected %.9g within %.2g",
                    n_values_, got, want, tolerance);
    }
  }
  void equal(double got, double want) { near(got, want, 0); }
  void untouched(const std::vector<float>& values, size_t from) {
    for (size_t i = from; i < values.size(); ++i) equal(values[i], kUntouched);
  }
  bool is_empty() const { return n_values_ == 0; }
  bool report(const char* table, const char* kernel) const {
    if (n_failures_ > 0) {
      std::printf("%-13s %-29s FAILED  %zu of %zu; first: %s\n", table, kernel, n_failures_, n_values_,
                  first_failure_);
    } else {
      std::printf("%-13s %-29s ok      %zu values, worst error %.2f of the tolerance\n", table, kernel,
                  n_values_, worst_);
    }
    return n_failures_ == 0;
  }

 private:
  size_t n_values_ = 0, n_failures_ = 0;
  double worst_ = 0;
  char first_failure_[160] = "";
};

// Checks of one kernel; `kernel` is the name of its field in KernelTable.
struct KernelCheck {
  const char* kernel;
  void (*run)(const KernelTable&, Check&);
};
const std::vector<KernelCheck>& matrix_checks();
const std::vector<KernelCheck>& row_checks();
const std::vector<KernelCheck>& recurrent_checks();
const std::vector<KernelCheck>& attention_checks();
const std::vector<KernelCheck>& attention_row_checks();
const std::vector<KernelCheck>& byte_packing_checks();
const std::vector<KernelCheck>& byte_attention_checks();

}  // namespace edgeh2o::selftest
