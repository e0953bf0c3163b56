#pragma once

#include <functional>
#include <string>
#include <vector>

#include "model/weights.h"

namespace edgeh2o {

// What is told of every tensor that a decoder knows, and the shapes that most of them have.
struct SlotList {
  std::function<void(const std::string& name, const Weights::Slot& slot)> add;

  void matrix(const std::string& name, PackedMatrix& slot, size_t rows, size_t cols, bool required) const {
    add(name, Weights::Slot{&slot, nullptr, rows, cols, required});
  }
  void vector(const std::string& name, std::vector<float>& slot, size_t size, bool required) const {
    add(name, Weights::Slot{nullptr, &slot, 1, size, required});
  }
  void linear(const std::string& name, Linear& slot, size_t rows, size_t cols) const {
    matrix(name + ".weight", slot.weight, rows, cols, true);
    vector(name + ".bias", slot.bias, rows, false);
  }
};

}  // namespace edgeh2o
