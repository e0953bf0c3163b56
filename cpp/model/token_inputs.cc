#include "model/token_inputs.h"

#include <cmath>

#include "model/branch.h"
#include "ops/rows.h"

namespace edgeh2o {
namespace {

// [tokens][token_input_dim], in the buffer `up`.
MatView<float> make_inputs(const LayerCall& call, Span<const int32_t> tokens) {
  const KernelTable& table = call.table();
  const DecoderConfig& config = call.config;
  const Weights& weights = call.weights;
  Activations& a = call.buffers();
  const size_t n = tokens.size, dim = call.spec().token_input_dim;
  const MatView<float> embedded{a.norm, n, config.model_dim, config.model_dim};
  const auto width = static_cast<float>(config.model_dim);
  embed_rows(table, weights.token_embd(), tokens, config.embedding_scale / std::sqrt(width), embedded);
  const MatView<float> projected{a.gate, n, dim, dim}, inputs{a.up, n, dim, dim};
  multiply(call, call.layer_weights().token_input_proj, as_const(embedded), projected);
  const std::vector<PackedMatrix>& parts = weights.token_inputs();
  embed_columns(table, {parts.data(), parts.size()}, tokens, call.layer * dim,
                std::sqrt(static_cast<float>(dim)), inputs);
  add_rows(table, inputs, projected, weights.token_input_norm().data(), config.norm_eps, 1.0f);
  scale_logits(table, inputs, std::sqrt(0.5f), 0.0f);
  return inputs;
}

}  // namespace

MatmulInput gated_token_input(const LayerCall& call, size_t first, MatView<float> x) {
  const KernelTable& table = call.table();
  const LayerWeights& w = call.layer_weights();
  Activations& a = call.buffers();
  const size_t n = x.rows, dim = call.spec().token_input_dim;
  const MatView<float> inputs = make_inputs(call, {call.step.tokens.data + first, n});
  const MatmulOutput gate = output_of(w.token_input_gate, a.gate, dim);
  matmul(table, begin_branch(call, x, {}, {&w.token_input_gate}), {&gate, 1}, call.products());
  const PackedOut packed = packed_for(call, {&w.token_input_out});
  const ActivationsOut product{{packed.needs_floats ? a.gate : nullptr, n, dim, dim}, packed};
  return gate_rows(table, table.geglu_f32, {a.gate, n, dim, dim}, {inputs.data, n, dim, dim}, product,
                   a.scratch);
}

void add_token_input(const LayerCall& call, size_t first, MatView<float> x) {
  const LayerWeights& w = call.layer_weights();
  end_branch(call, x, gated_token_input(call, first, x), w.token_input_out, w.token_input_post_norm);
}

}  // namespace edgeh2o
