// What one layer keeps of a prompt.
#pragma once

#include <cstddef>

#include "base/byte_stream.h"

namespace edgeh2o {

class LayerState {
 public:
  virtual ~LayerState() = default;

  // Tokens that the layer has read.
  virtual size_t n_tokens() const = 0;

  // Forgets the tokens from n_tokens on.
  virtual void rewind(size_t n_tokens) = 0;

  // Saved states: all but cached rows, which are read and written where they lie. `load` takes bytes from
  // anywhere and throws std::invalid_argument for what could not have been saved.
  virtual void save(ByteWriter& out) const = 0;
  virtual void load(size_t n_tokens, ByteReader& in) = 0;
};

}  // namespace edgeh2o
