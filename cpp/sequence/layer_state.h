// What one layer keeps of a prompt.
#pragma once

#include <cstddef>

#include "base/byte_stream.h"
#include "ops/attention_sizes.h"
#include "ops/recurrence.h"

namespace edgeh2o {

// What a layer keeps of the tokens: keys and values of its heads, a recurrent state, both, or nothing.
struct LayerKeeps {
  AttentionHeads heads;
  Recurrence recurrence = {};
  bool is_windowed = false;  // queries see the latest positions only, whatever the policy says
  size_t chunk = 0;          // of a chunk of so many positions, if it is not 0
};

class LayerState {
 public:
  virtual ~LayerState() = default;

  // Tokens that the layer has read.
  virtual size_t n_tokens() const = 0;

  // Counts tokens that what is kept holds already.
  virtual void advance(size_t n_tokens) = 0;

  // Forgets the tokens from n_tokens on, if it can.
  virtual void rewind(size_t n_tokens) = 0;

  // Counts those that are kept as the first n_tokens: others were evicted.
  virtual void renumber(size_t n_tokens) = 0;

  // Saved states: all but cached rows, which are read and written where they lie. `load` takes bytes from
  // anywhere and throws std::invalid_argument for what could not have been saved.
  virtual void save(ByteWriter& out) const = 0;
  virtual void load(size_t n_tokens, ByteReader& in) = 0;
};

}  // namespace edgeh2o
