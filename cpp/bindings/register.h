#pragma once

#include <pybind11/pybind11.h>

namespace edgeh2o {

void bind_attention(pybind11::module_& module);
void bind_attention_session(pybind11::module_& module);
void bind_matmul(pybind11::module_& module);
void bind_model(pybind11::module_& module);
void bind_session(pybind11::module_& module);

}  // namespace edgeh2o
