// Compares every kernel of every kernel table that this processor can run with plain loops. Stand-alone and
// small, so that it also runs under an emulator. Prints one line per table and kernel; exits 1 if one of them
// differs, 2 if the tables cannot be chosen.
//
//   kernel_selftest [TABLE ...]   checks the named tables, or all available ones
//   kernel_selftest --list        prints the names of the available tables, then the active one
#include <cstdio>
#include <cstring>
#include <exception>
#include <vector>

#include "isa/select.h"
#include "tests/kernels/selftest/check.h"

namespace edgeh2o::selftest {
namespace {

bool check_tables(const std::vector<const KernelTable*>& tables) {
  bool ok = true;
  for (const KernelTable* table : tables) {
    for (const auto& checks : {matrix_checks(), row_checks(), attention_checks(), byte_attention_checks()}) {
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

}  // namespace
}  // namespace edgeh2o::selftest

int main(int argc, char** argv) {
  using namespace edgeh2o;
  try {
    if (argc == 2 && std::strcmp(argv[1], "--list") == 0) {
      selftest::list_tables();
      return 0;
    }
    std::vector<const KernelTable*> tables;
    for (int i = 1; i < argc; ++i) tables.push_back(&find_kernel_table(argv[i]));
    return selftest::check_tables(tables.empty() ? available_kernel_tables() : tables) ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 2;
  }
}
