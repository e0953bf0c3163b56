#include "isa/select.h"

#include <atomic>
#include <cstdlib>

#include "base/check.h"
#include "base/cpu_features.h"

namespace edgeh2o {

#define EH2O_TABLE(isa)            \
  namespace isa {                  \
  extern const KernelTable kTable; \
  }
EH2O_TABLE(scalar)
#if defined(__x86_64__)
EH2O_TABLE(avx2)
EH2O_TABLE(avxvnni)
EH2O_TABLE(avx512vnni)
EH2O_TABLE(avx512bf16)
#elif defined(__aarch64__)
EH2O_TABLE(neon)
EH2O_TABLE(neon_dotprod)
EH2O_TABLE(neon_i8mm)
#endif
#undef EH2O_TABLE

const std::vector<const KernelTable*>& available_kernel_tables() {
  static const std::vector<const KernelTable*> tables = [] {
    std::vector<const KernelTable*> found{&scalar::kTable};
    [[maybe_unused]] const CpuFeatures features = detect_cpu_features();
#if defined(__x86_64__)
    if (features.avx2) found.push_back(&avx2::kTable);
    if (features.avxvnni) found.push_back(&avxvnni::kTable);
    if (features.avx512vnni) found.push_back(&avx512vnni::kTable);
    if (features.avx512bf16) found.push_back(&avx512bf16::kTable);
#elif defined(__aarch64__)
    if (features.neon) found.push_back(&neon::kTable);
    if (features.neon_dotprod) found.push_back(&neon_dotprod::kTable);
    if (features.neon_i8mm) found.push_back(&neon_i8mm::kTable);
#endif
    return found;
  }();
  return tables;
}

const KernelTable& find_kernel_table(const std::string& name) {
  std::string names;
  for (const KernelTable* table : available_kernel_tables()) {
    if (name == table->name) return *table;
    names += (names.empty() ? "" : ", ") + std::string(table->name);
  }
  throw_invalid("ISA '", name, "' is not available on this processor; available: ", names);
}

namespace {
std::atomic<const KernelTable*> g_active{nullptr};
}

const KernelTable& active_kernel_table() {
  const KernelTable* table = g_active.load(std::memory_order_acquire);
  if (table == nullptr) {
    const char* forced = std::getenv("EDGEH2O_ISA");
    table = forced && *forced ? &find_kernel_table(forced) : available_kernel_tables().back();
    g_active.store(table, std::memory_order_release);
  }
  return *table;
}

void use_isa(const std::string& name) { g_active.store(&find_kernel_table(name), std::memory_order_release); }

}  // namespace edgeh2o
