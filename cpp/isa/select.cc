#include "isa/select.h"

#include <atomic>
#include <cstdlib>

#include "base/check.h"
#include "base/cpu_features.h"

namespace edgeh2o {

// The build names the instruction sets that it compiled beside scalar, slowest first: setup.py.
#ifndef EH2O_ISAS
#error "compile with -DEH2O_ISAS='X(avx2) X(avx512vnni)' or the like"
#endif

#define X(isa)                     \
  namespace isa {                  \
  extern const KernelTable kTable; \
  }
#define BF16(isa, base)                \
  namespace isa {                      \
  extern const Bf16Addition kAddition; \
  }
X(scalar)
EH2O_ISAS
#undef BF16
#undef X

namespace {

// Here, since code that was compiled for an ISA must not run before the processor is known to have it.
[[maybe_unused]] KernelTable with_bf16(const KernelTable& base, const char* name, const Bf16Addition& added) {
  KernelTable table = base;
  table.name = name;
  table.attention[static_cast<int>(AttentionPrecision::kBf16)] = added.attention;
  if (added.is_preferred) table.best_precision = AttentionPrecision::kBf16;
  return table;
}

}  // namespace

const std::vector<const KernelTable*>& available_kernel_tables() {
  static const std::vector<const KernelTable*> tables = [] {
    std::vector<const KernelTable*> found{&scalar::kTable};
    [[maybe_unused]] const CpuFeatures features = detect_cpu_features();
#define X(isa) \
  if (features.isa) found.push_back(&isa::kTable);
#define BF16(isa, base)                                                             \
  if (features.isa) {                                                               \
    static const KernelTable table = with_bf16(base::kTable, #isa, isa::kAddition); \
    found.push_back(&table);                                                        \
  }
    EH2O_ISAS
#undef BF16
#undef X
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
