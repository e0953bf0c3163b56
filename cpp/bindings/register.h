#pragma once

#include <pybind11/pybind11.h>

#include "ops/chunked_attention.h"

namespace edgeh2o {

// As Python says it: stays_open counts for the last call of a prompt only.
inline PromptEnd prompt_end(bool is_last, bool stays_open) {
  if (!is_last) return PromptEnd::kLater;
  return stays_open ? PromptEnd::kOpen : PromptEnd::kFinal;
}

void bind_attention(pybind11::module_& module);
void bind_chunked_attention(pybind11::module_& module);
void bind_device(pybind11::module_& module);
void bind_drafting(pybind11::module_& module);
void bind_matmul(pybind11::module_& module);
void bind_model(pybind11::module_& module);
void bind_packed_weights(pybind11::module_& module);
void bind_sequence(pybind11::module_& module);
void bind_strings(pybind11::module_& module);

}  // namespace edgeh2o
