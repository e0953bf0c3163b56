// What a recurrent layer keeps of the tokens that it has read: numbers whose count does not depend on how
// many there were. They are of the last token alone, so that nothing of them can be taken back.
#pragma once

#include "base/arena.h"
#include "sequence/layer_state.h"

namespace edgeh2o {

class RecurrentState final : public LayerState {
 public:
  // Takes n_values numbers from the arena, which may still be counting; zero is the state of no tokens.
  RecurrentState(size_t n_values, Arena& arena);

  float* values() { return values_; }
  size_t n_values() const { return n_values_; }
  // How often the numbers were replaced by others than those of the next tokens: who keeps a copy elsewhere,
  // on a device, has to take them again.
  size_t n_replaced() const { return n_replaced_; }

  size_t n_tokens() const override { return n_tokens_; }
  void advance(size_t n_tokens) override { n_tokens_ += n_tokens; }
  // To where it is, or to nothing. Throws std::invalid_argument for all between.
  void rewind(size_t n_tokens) override;
  void renumber(size_t n_tokens) override { n_tokens_ = n_tokens; }
  void save(ByteWriter& out) const override;
  void load(size_t n_tokens, ByteReader& in) override;

 private:
  float* values_;
  size_t n_values_, n_tokens_ = 0, n_replaced_ = 0;
};

}  // namespace edgeh2o
