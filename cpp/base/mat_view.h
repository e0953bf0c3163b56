// Non-owning views: a span of elements, and a row-major matrix with a row stride in elements.
#pragma once

#include <cstddef>

namespace edgeh2o {

template <typename T>
struct Span {
  T* data = nullptr;
  size_t size = 0;
  T& operator[](size_t i) const { return data[i]; }
  T* begin() const { return data; }
  T* end() const { return data + size; }
};

template <typename T>
struct MatView {
  T* data = nullptr;
  size_t rows = 0;
  size_t cols = 0;
  size_t stride = 0;  // elements between the starts of two rows
  T* row(size_t i) const { return data + i * stride; }
  MatView rows_from(size_t first, size_t count) const { return {row(first), count, cols, stride}; }
};

template <typename T>
MatView<const T> as_const(const MatView<T>& m) {
  return {m.data, m.rows, m.cols, m.stride};
}

}  // namespace edgeh2o
