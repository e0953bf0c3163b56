#include "sequence/recurrent_state.h"

#include <algorithm>

namespace edgeh2o {

RecurrentState::RecurrentState(size_t n_values, Arena& arena)
    : values_(arena.take<float>(n_values)), n_values_(n_values) {}

void RecurrentState::rewind(size_t n_tokens) {
  if (n_tokens == n_tokens_ && n_tokens > 0) return;
  EH2O_CHECK(n_tokens == 0, "a recurrent state of ", n_tokens_, " tokens cannot go back to ", n_tokens);
  // Of no tokens too: an interrupted call leaves numbers behind before it counts its tokens.
  std::fill_n(values_, n_values_, 0.0f);
  n_tokens_ = 0;
  ++n_replaced_;
}

void RecurrentState::save(ByteWriter& out) const { out.put_array(values_, n_values_); }

void RecurrentState::load(size_t n_tokens, ByteReader& in) {
  in.take_array(values_, n_values_);
  n_tokens_ = n_tokens;
  ++n_replaced_;
}

}  // namespace edgeh2o
