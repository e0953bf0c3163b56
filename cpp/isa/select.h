// Which kernel tables exist in this build and run on this processor, and which one is active.
#pragma once

#include <string>
#include <vector>

#include "isa/kernel_table.h"

namespace edgeh2o {

// Tables that this processor can run, weakest first; "scalar" is always there.
const std::vector<const KernelTable*>& available_kernel_tables();

// Throws std::invalid_argument that lists the available names.
const KernelTable& find_kernel_table(const std::string& name);

// The table that new models and sessions use: the strongest, unless EDGEH2O_ISA or use_isa chose another.
const KernelTable& active_kernel_table();
void use_isa(const std::string& name);

}  // namespace edgeh2o
