#include "model/mixers/indexer.h"

#include <cmath>

#include "base/parallel.h"
#include "ops/rows.h"

namespace edgeh2o {
namespace {

// Of the norm of keys, in all models there are.
constexpr float kNormEps = 1e-6f;

}  // namespace

IndexRows index_rows(const LayerCall& call, size_t n) {
  const LayerSpec& spec = call.spec();
  const IndexHeads& index = spec.heads.index;
  const size_t stride = spec.qkv_dim();
  float *q = call.buffers().qkv + stride - index.row_dim(), *k = q + index.q_dim();
  return {{q, n, index.q_dim(), stride},
          {k, n, index.key_dim, stride},
          {k + index.key_dim, n, index.n_weights(), stride}};
}

void finish_index_rows(const LayerCall& call, size_t first_row, const IndexRows& rows) {
  const KernelTable& table = call.table();
  const LayerWeights& w = call.layer_weights();
  const IndexHeads& index = call.spec().heads.index;
  const RopeTable& rope = call.buffers().ropes[call.spec().rope];
  const size_t n_pairs = call.spec().latent.rope_dim / 2;
  const float *cos = rope.cos + first_row * n_pairs, *sin = rope.sin + first_row * n_pairs;
  const float scale = 1.0f / std::sqrt(static_cast<float>(index.q_dim()));
  parallel_for(rows.k.rows, [&](size_t i, size_t) {
    float *k = rows.k.row(i), *weights = rows.weights.row(i);
    table.layer_norm_f32(k, k, w.index_k_norm.data(), w.index_k_norm_bias.data(), index.key_dim, kNormEps);
    table.scale_f32(weights, weights, scale, index.n_heads);
  });
  rope_rows(table, rows.q, cos, sin, index.key_dim, n_pairs);
  rope_rows(table, rows.k, cos, sin, index.key_dim, n_pairs);
}

void finish_block_rows(const LayerCall& call, size_t first_row, const IndexRows& rows) {
  const LayerWeights& w = call.layer_weights();
  const RopeTable& rope = call.buffers().ropes[call.spec().rope];
  const IndexHeads& index = call.spec().heads.index;
  const size_t n_pairs = call.config.rope(call.layer).n_pairs(), row = first_row * n_pairs;
  const auto finish = [&](MatView<float> some, const std::vector<float>& norm) {
    rms_norm_groups(call.table(), some, {norm.data(), norm.size()}, call.config.norm_eps);
    rope_rows(call.table(), some, rope.cos + row, rope.sin + row, index.key_dim, n_pairs);
  };
  finish(rows.q, w.index_q_norm);
  if (!index.pools_keys()) finish(rows.k, w.index_k_norm);
}

ChosenPositions choose_positions(const LayerCall& call, const IndexRows& rows, size_t first) {
  const ChosenPositions chosen = call.workspace.chosen().rows_from(call.first_row + first);
  const IndexHeads& index = call.spec().heads.index;
  if (index.has_own()) {
    const LayerWeights& w = call.layer_weights();
    MatView<const float> weights = as_const(rows.weights);
    if (index.scores_blocks()) {
      weights = {w.index_ones.data(), rows.q.rows, index.n_heads, 0};
    }
    if (index.pools_keys()) {
      const RopeConfig& rope = call.config.rope(call.layer);
      const std::vector<float>& inv_freq = rope.of_context(call.step.sequence->shape().max_context);
      call.step.sequence->pool_blocks(call.layer, {index.block_tokens,
                                                   w.index_k_norm.data(),
                                                   call.config.norm_eps,
                                                   {inv_freq.data(), inv_freq.size()},
                                                   rope.attention_factor});
    }
    call.step.sequence->choose(call.layer, as_const(rows.q), weights, call.position() + first,
                               call.workspace.attention_scratch(),
                               static_cast<size_t>(call.workspace.n_threads()), chosen);
  }
  return chosen;
}

}  // namespace edgeh2o
