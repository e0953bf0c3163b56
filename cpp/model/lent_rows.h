// Keys and values that lie in the sequence of one model, as the layers of another read them, which drafts for
// it.
#pragma once

#include <cstddef>
#include <vector>

#include "base/kv_rows.h"
#include "base/mat_view.h"
#include "isa/kernel_table.h"
#include "model/decoder_config.h"
#include "ops/attention_plan.h"

namespace edgeh2o {

class LentRows {
 public:
  // For sequences of so many positions. Throws std::invalid_argument where a layer of `config` does not find
  // the layer that it reads in `main`, or finds heads of another shape, or another window.
  LentRows(const KernelTable& table, const DecoderConfig& config, const DecoderConfig& main,
           size_t max_context);

  size_t max_context() const { return max_context_; }
  size_t scratch_bytes(size_t n_threads) const;

  // The attention of a layer of the drafting model for one row q [1][q_dim] at `position`, whose own key is
  // not there: it sees the `window` - 1 positions before (0: all), the last of which is position - 1. out
  // [1][out_dim].
  void attend(size_t layer, MatView<const float> q, const LayerKv& kv, size_t position, size_t window,
              uint8_t* scratch, size_t n_threads, MatView<float> out) const;

 private:
  size_t max_context_;
  std::vector<AttentionPlan> plans_;  // of every layer
};

}  // namespace edgeh2o
