// Compares every kernel of every kernel table that this processor can run with plain loops. Stand-alone and
// small, so that it also runs under an emulator. Prints one line per table and kernel; exits 1 if one of them
// differs, 2 if the tables cannot be chosen.
//
//   kernel_selftest [TABLE ...]   checks the named tables, or all available ones
//   kernel_selftest --list        prints the names of the available tables, then the active one
//   kernel_selftest --threads     checks the loops over several threads
//   kernel_selftest --device      checks the kernels of the first GPU by the loader of the core; the image is
//                                 one that the host device of the tests takes (cpp/cuda/host)
#include <cstdio>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

#include "cuda/device.h"
#include "cuda/self_test.h"
#include "isa/select.h"
#include "tests/kernels/selftest/check.h"
#include "tests/kernels/selftest/thread_checks.h"

namespace edgeh2o::selftest {
namespace {

bool check_tables(const std::vector<const KernelTable*>& tables) {
  bool ok = true;
  for (const KernelTable* table : tables) {
    for (const auto& checks : {matrix_checks(), row_checks(), recurrent_checks(), attention_checks(),
                               attention_row_checks(), byte_packing_checks(), byte_attention_checks()}) {
      for (const KernelCheck& kernel_check : checks) {
        Check check;
        kernel_check.run(*table, check);
        if (check.is_empty()) {  // kernels that the instruction set has not got
          std::printf("%-13s %-29s absent\n", table->name, kernel_check.kernel);
          continue;
        }
        ok &= check.report(table->name, kernel_check.kernel);
      }
    }
  }
  return ok;
}

void list_tables() {
  for (const KernelTable* table : available_kernel_tables()) std::printf("%s\n", table->name);
  std::printf("active: %s\n", active_kernel_table().name);
}

bool check_device() {
  cuda::Device device(0);
  device.load_image(
      "\x7f"
      "ELF");
  const std::string difference = cuda::run_self_test(device);
  std::printf("%s: %s\n", device.properties().name.c_str(),
              difference.empty() ? "passed" : difference.c_str());
  return difference.empty();
}

}  // namespace
}  // namespace edgeh2o::selftest

int main(int argc, char** argv) {
  using namespace edgeh2o;
  try {
    if (argc == 2 && std::strcmp(argv[1], "--list") == 0) {
      selftest::list_tables();
      return 0;
    }
    if (argc == 2 && std::strcmp(argv[1], "--threads") == 0) return selftest::check_threads() ? 0 : 1;
    if (argc == 2 && std::strcmp(argv[1], "--device") == 0) return selftest::check_device() ? 0 : 1;
    std::vector<const KernelTable*> tables;
    for (int i = 1; i < argc; ++i) tables.push_back(&find_kernel_table(argv[i]));
    return selftest::check_tables(tables.empty() ? available_kernel_tables() : tables) ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 2;
  }
}
