// What a recurrent layer keeps of the tokens that it has read. The numbers are those of the last token alone.
//
// A call that looks ahead leaves them apart: until it is known how many of its tokens count, the numbers
// before it stay, beside those after all of its tokens and what went into the recurrence of each. `settle`
// takes the latter numbers if all count, and else goes through those that do once more, which needs no
// weights.
#pragma once

#include "base/arena.h"
#include "base/mat_view.h"
#include "isa/kernel_table.h"
#include "ops/recurrence.h"
#include "sequence/layer_state.h"

namespace edgeh2o {

class RecurrentState final : public LayerState {
 public:
  // Takes its numbers from the arena, which may still be counting; zero is the state of no tokens. A call
  // that looks ahead has up to most_ahead tokens; below 2 there is none, and nothing is taken for it.
  RecurrentState(const Recurrence& recurrence, size_t most_ahead, Arena& arena);
  // What that takes.
  static size_t ahead_bytes(const Recurrence& recurrence, size_t most_ahead);

  // Of all tokens; throws std::invalid_argument where that is not settled.
  float* values();
  size_t n_values() const { return recurrence_.n_values(); }
  size_t history_at() const { return recurrence_.history_at(); }  // of these numbers
  // How often the numbers were replaced by others than those of the next tokens: who keeps a copy elsewhere,
  // on a device, has to take them again.
  size_t n_replaced() const { return n_replaced_; }

  // For the rows of a call from its row `begin` on, taken in order.
  StateStep step(bool looks_ahead, size_t begin);
  // Of such rows of a call that looks ahead: inputs [n][conv_dim] of the convolution, and, where there are
  // matrices, what comes out of it and their gates, [n][n_gates] and [n][n_decays]; of a scan, its channels
  // and what they make, as selective_scan takes them. a, of the layer's weights, is read when the tokens are
  // settled.
  void note_inputs(size_t begin, MatView<const float> inputs);
  void note_rows(size_t begin, MatView<const float> rows, MatView<const float> rates,
                 MatView<const float> decays);
  // Those of a layer that keeps the inputs of two shifts, one at a time: the columns from `column` on.
  void note_part(size_t begin, size_t column, MatView<const float> inputs);
  // [n][history_dim], where there is a history.
  void note_history(size_t begin, MatView<const float> inputs);
  // [n][row_dim] of RWKV, as wkv or wkv6 takes them.
  void note_changes(size_t begin, MatView<const float> rows);
  void note_scan(size_t begin, MatView<const float> x, MatView<const float> steps, MatView<const float> bc,
                 const float* a);

  size_t n_tokens() const override { return n_tokens_; }
  // After a call that looked ahead: tokens of it that count too.
  void advance(size_t n_tokens) override;
  // Counts the tokens of a call that looked ahead, all of them: `rewind` takes back those that do not count.
  void look_ahead(size_t n_tokens);
  void settle(const KernelTable& table);
  // To where it is, to tokens of a call that looked ahead, or to nothing. Throws std::invalid_argument for
  // all between.
  void rewind(size_t n_tokens) override;
  void renumber(size_t n_tokens) override { n_tokens_ = n_tokens; }
  void save(ByteWriter& out) const override;  // what is settled
  void load(size_t n_tokens, ByteReader& in) override;

 private:
  Recurrence recurrence_;
  float* values_;
  float* ahead_ = nullptr;                      // numbers after all tokens of the call
  float *inputs_ = nullptr, *rows_ = nullptr;   // [most_ahead][conv_dim] and [row_dim]
  float* history_ = nullptr;                    // [most_ahead][history_dim]
  float *rates_ = nullptr, *decays_ = nullptr;  // [most_ahead][n_gates] and [n_decays]
  float *steps_ = nullptr, *bc_ = nullptr;      // [most_ahead][n_channels] and [bc_dim] of a scan
  const float* a_ = nullptr;                    // of a scan
  float* discarded_ = nullptr;                  // [out_dim]
  size_t n_ahead_ = 0, n_kept_ = 0;             // tokens of the call, and those that count
  size_t n_tokens_ = 0, n_replaced_ = 0;
};

}  // namespace edgeh2o
