// What a sparse attention costs, measured while it runs: a few queries of a call also read everything.
#pragma once

#include <algorithm>

#include "base/arena.h"
#include "base/kv_rows.h"
#include "base/mat_view.h"
#include "ops/attention_plan.h"
#include "ops/decode_attention.h"
#include "ops/rounded_rows.h"

namespace edgeh2o {

// Sums of squares over the sampled rows and their heads: of what the sparse output differs by, and of the
// dense output.
struct AttentionError {
  double difference = 0.0, dense = 0.0;

  double relative() const { return dense > 0.0 ? std::max(difference, 0.0) / dense : 0.0; }
  // A row of n numbers.
  void add_row(const float* sparse, const float* exact, size_t n);
  // Less what the row differs by if it reads everything, but in products of 8 bits.
  void subtract_row(const float* rounded, const float* exact, size_t n);
  AttentionError& operator+=(const AttentionError& other) {
    difference += other.difference;
    dense += other.dense;
    return *this;
  }
};

// Rows of a call: at most n_rows, at even distances among those that may have missed something, which begin
// after the first chunk of a prompt and end before the n_dense last of n_tokens. Each `turn` takes others.
class SampledRows {
 public:
  SampledRows(const AttentionPlan& plan, size_t n_tokens, size_t first_position, size_t n_dense,
              size_t n_rows, size_t turn);

  size_t size() const { return n_; }
  size_t operator[](size_t i) const;  // ascending

 private:
  size_t begin_, end_, n_;
  double offset_;
};

class ErrorSample {
 public:
  // scratch: scratch_bytes bytes, of anything.
  ErrorSample(const AttentionPlan& plan, uint8_t* scratch, size_t n_threads);
  static size_t scratch_bytes(const AttentionPlan& plan, size_t n_threads);

  // Adds to `errors`, one of every memory set, those of some rows of a call that gave `out`
  // [n_tokens][out_dim]. q, first_position, kv: as for ChunkedAttention::run.
  void measure(MatView<const float> q, const LayerKv& kv, size_t first_position, MatView<const float> out,
               const SampledRows& rows, AttentionError* errors);
  // After `measure`, of a plan with products in 8 bits: takes off what the rows differ by if they read
  // everything in these. A sparse output errs by its own rounding, which is as large in the mean
  // (docs/quality.md, "The guard").
  void subtract_rounding(MatView<const float> q, const LayerKv& kv, size_t first_position,
                         const SampledRows& rows, AttentionError* errors);

 private:
  size_t attend_exactly(MatView<const float> q, const LayerKv& kv, size_t first_position,
                        const SampledRows& rows, size_t first);

  const AttentionPlan& plan_;
  float* q_;                   // [kMaxDecodeTokens][q_dim] queries, which lie apart in the call
  float *out_, *rounded_out_;  // [kMaxDecodeTokens][out_dim]
  // On the same scratch, one after the other.
  DecodeAttention attention_;
  RoundedRows rounded_;
};

}  // namespace edgeh2o
