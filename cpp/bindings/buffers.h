#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cerrno>
#include <string>

#include "base/check.h"
#include "base/mat_view.h"

namespace edgeh2o {

// Of what Python has as another type or layout, a copy.
using FloatArray = pybind11::array_t<float, pybind11::array::c_style | pybind11::array::forcecast>;

// What a Python object with the buffer protocol holds; valid as long as `info`. Throws std::invalid_argument,
// naming `what`, unless these are contiguous bytes.
inline Span<const uint8_t> contiguous_bytes(const pybind11::buffer_info& info, const std::string& what) {
  EH2O_CHECK(info.ndim == 1 && info.itemsize == 1 && info.strides[0] == 1, what, " must be contiguous bytes");
  return {static_cast<const uint8_t*>(info.ptr), static_cast<size_t>(info.size)};
}

// Throws the OSError of an error number of the system.
[[noreturn]] inline void throw_os_error(int number) {
  errno = number;
  PyErr_SetFromErrno(PyExc_OSError);
  throw pybind11::error_already_set();
}

}  // namespace edgeh2o
