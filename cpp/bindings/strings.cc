#include <pybind11/pybind11.h>

#include <cstring>

#include "base/check.h"
#include "bindings/register.h"

namespace py = pybind11;

namespace edgeh2o {
namespace {

// The length in front of a string of a GGUF file, little-endian as are all machines that this is built for.
uint64_t read_length(const char* p) {
  uint64_t length;
  std::memcpy(&length, p, sizeof(length));
  return length;
}

// Strings from byte `position` of `data` on, each a u64 length and its bytes: `count` of them, or those in
// front of the first one that data does not hold or that is not UTF-8. Also the position behind them.
py::tuple read_strings(const py::bytes& data, size_t position, size_t count) {
  char* start;
  Py_ssize_t size;
  if (PyBytes_AsStringAndSize(data.ptr(), &start, &size) != 0) throw py::error_already_set();
  const auto end = static_cast<size_t>(size);
  EH2O_CHECK(position <= end, "position ", position, " is outside the ", end, " bytes");
  py::list texts;
  while (texts.size() < count && end - position >= sizeof(uint64_t)) {
    const uint64_t length = read_length(start + position);
    if (length > end - position - sizeof(uint64_t)) break;
    const char* text = start + position + sizeof(uint64_t);
    const auto string = py::reinterpret_steal<py::object>(
        PyUnicode_DecodeUTF8(text, static_cast<Py_ssize_t>(length), nullptr));
    if (!string) {
      if (!PyErr_ExceptionMatches(PyExc_UnicodeDecodeError)) throw py::error_already_set();
      PyErr_Clear();
      break;
    }
    texts.append(string);
    position += sizeof(uint64_t) + length;
  }
  return py::make_tuple(texts, position);
}

}  // namespace

void bind_strings(py::module_& module) {
  module.def("read_strings", &read_strings, py::arg("data"), py::arg("position"), py::arg("count"));
}

}  // namespace edgeh2o
