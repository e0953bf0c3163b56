#include <pybind11/pybind11.h>

#include <cstring>

#include "base/check.h"
#include "base/mat_view.h"
#include "bindings/register.h"

namespace py = pybind11;

namespace edgeh2o {
namespace {

Span<const char> contents(const py::bytes& data, size_t position) {
  char* start;
  Py_ssize_t size;
  if (PyBytes_AsStringAndSize(data.ptr(), &start, &size) != 0) throw py::error_already_set();
  const auto end = static_cast<size_t>(size);
  EH2O_CHECK(position <= end, "position ", position, " is outside the ", end, " bytes");
  return {start, end};
}

// The length in front of a string of a GGUF file, little-endian as are all machines that this is built for.
uint64_t read_length(const char* p) {
  uint64_t length;
  std::memcpy(&length, p, sizeof(length));
  return length;
}

// Whether these are the well-formed sequences of the Unicode standard, table 3-7: what Python decodes.
bool is_utf8(const char* text, size_t size) {
  const auto* p = reinterpret_cast<const uint8_t*>(text);
  const uint8_t* const end = p + size;
  while (p < end) {
    if (*p < 0x80) {
      ++p;
      continue;
    }
    const uint8_t lead = *p;
    const ptrdiff_t length = lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
    if (lead < 0xc2 || lead > 0xf4 || end - p < length) return false;
    // No overlong forms, surrogates, or code points beyond U+10FFFF.
    const uint8_t low = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
    const uint8_t high = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
    if (p[1] < low || p[1] > high) return false;
    for (ptrdiff_t i = 2; i < length; ++i) {
      if ((p[i] & 0xc0) != 0x80) return false;
    }
    p += length;
  }
  return true;
}

// How many strings of `count` there are from byte `position` of `data` on, in front of the first one that
// data does not hold or that is not UTF-8, and the position behind them. None is made: that takes 6 times as
// long.
py::tuple count_strings(const py::bytes& data, size_t position, size_t count) {
  const Span<const char> bytes = contents(data, position);
  size_t n_found = 0;
  for (; n_found < count && bytes.size - position >= sizeof(uint64_t); ++n_found) {
    const uint64_t length = read_length(bytes.data + position);
    const char* text = bytes.data + position + sizeof(uint64_t);
    if (length > bytes.size - position - sizeof(uint64_t) || !is_utf8(text, length)) break;
    position += sizeof(uint64_t) + length;
  }
  return py::make_tuple(n_found, position);
}

// Strings from byte `position` of `data` on, each a u64 length and its bytes: `count` of them, or those in
// front of the first one that data does not hold or that is not UTF-8. Also the position behind them.
py::tuple read_strings(const py::bytes& data, size_t position, size_t count) {
  const Span<const char> bytes = contents(data, position);
  py::list texts;
  while (texts.size() < count && bytes.size - position >= sizeof(uint64_t)) {
    const uint64_t length = read_length(bytes.data + position);
    if (length > bytes.size - position - sizeof(uint64_t)) break;
    const char* text = bytes.data + position + sizeof(uint64_t);
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
  module.def("count_strings", &count_strings, py::arg("data"), py::arg("position"), py::arg("count"));
  module.def("read_strings", &read_strings, py::arg("data"), py::arg("position"), py::arg("count"));
}

}  // namespace edgeh2o
