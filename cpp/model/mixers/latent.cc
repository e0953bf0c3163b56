#include "model/mixers/latent.h"

#include <cstring>

#include "base/parallel.h"
#include "model/branch.h"
#include "ops/rows.h"

namespace edgeh2o {
namespace {

Span<const PackedMatrix> matrices(const std::vector<PackedMatrix>& heads) {
  return {heads.data(), heads.size()};
}

}  // namespace

void project_latent(const LayerCall& call, MatView<float> x, size_t first_row, MatView<float> q,
                    MatView<float> row, const IndexRows& index) {
  const KernelTable& table = call.table();
  const LayerWeights& w = call.layer_weights();
  const LatentHeads& latent = call.spec().latent;
  Activations& a = call.buffers();
  const size_t n = x.rows, n_heads = call.spec().heads.n_heads, head_dim = latent.head_dim();
  const float eps = call.config.norm_eps;
  const MatView<float> vectors{a.inner, n, latent.q_rank, latent.q_rank};
  const MatView<float> heads{a.inner + n * latent.q_rank, n, n_heads * head_dim, n_heads * head_dim};

  const bool has_vectors = latent.q_rank > 0;
  const Linear& from_input = has_vectors ? w.attn_q_a : w.attn_q;
  const bool has_index = call.spec().heads.index.has_own(), has_gate = call.spec().has_gate_matrix();
  const Linear& gate = has_gate ? w.attn_gate : from_input;
  const MatmulInput input =
      has_index ? begin_branch(call, x, w.attn_norm,
                               {&from_input, &w.attn_kv_a, &w.index_k, &w.index_weights, &gate})
                : begin_branch(call, x, w.attn_norm, {&from_input, &w.attn_kv_a, &gate});
  const MatView<float>& first = has_vectors ? vectors : heads;
  MatmulOutput outputs[5] = {output_of(from_input, first.data, first.stride),
                             output_of(w.attn_kv_a, row.data, row.stride)};
  size_t n_outputs = 2;
  if (has_index) {
    outputs[n_outputs++] = output_of(w.index_k, index.k.data, index.k.stride);
    outputs[n_outputs++] = output_of(w.index_weights, index.weights.data, index.weights.stride);
  }
  if (has_gate) {
    outputs[n_outputs++] = output_of(w.attn_gate, q.data - call.spec().gate_dim(), q.stride);
  }
  matmul(table, input, {outputs, n_outputs}, call.products());
  if (has_vectors) {
    const MatmulInput normed = rms_norm_rows(table, as_const(vectors), w.attn_q_a_norm.data(), eps,
                                             {vectors, packed_for(call, {&w.attn_q, &w.index_q})}, a.scratch);
    const MatmulOutput of_vectors[] = {output_of(w.attn_q, heads.data, heads.stride),
                                       output_of(w.index_q, index.q.data, index.q.stride)};
    matmul(table, normed, {of_vectors, has_index ? size_t{2} : size_t{1}}, call.products());
  }
  if (has_index) finish_index_rows(call, first_row, index);
  rms_norm_groups(table, {row.data, n, latent.rank, row.stride},
                  {w.attn_kv_a_norm.data(), w.attn_kv_a_norm.size()}, eps);
  if (call.spec().has_latent_key_norm) {
    rms_norm_groups(table, {row.data + latent.rank, n, latent.rope_dim, row.stride},
                    {w.attn_k_norm.data(), w.attn_k_norm.size()}, eps);
  }

  const RopeTable& rope = a.ropes[call.spec().rope];
  const size_t n_pairs = latent.rope_dim / 2;
  const float *cos = rope.cos + first_row * n_pairs, *sin = rope.sin + first_row * n_pairs;
  rope_rows(table, {heads.data + latent.nope_dim, n, heads.cols, heads.stride}, cos, sin, head_dim, n_pairs);
  rope_rows(table, {row.data + latent.rank, n, latent.rope_dim, row.stride}, cos, sin, latent.rope_dim,
            n_pairs);

  matmul_heads(table, as_const(heads), a.packed, head_dim, matrices(w.attn_k_b), q.data, q.stride,
               latent.row_dim(), call.products());
  parallel_for(n, [&](size_t i, size_t) {
    for (size_t head = 0; head < n_heads; ++head) {
      std::memcpy(q.row(i) + head * latent.row_dim() + latent.rank,
                  heads.row(i) + head * head_dim + latent.nope_dim, latent.rope_dim * sizeof(float));
    }
  });
}

MatView<const float> latent_values(const LayerCall& call, MatView<const float> attended) {
  const LayerWeights& w = call.layer_weights();
  const LatentHeads& latent = call.spec().latent;
  Activations& a = call.buffers();
  const size_t out_dim = call.spec().heads.n_heads * latent.value_dim;
  matmul_heads(call.table(), attended, a.packed, latent.row_dim(), matrices(w.attn_v_b), a.inner, out_dim,
               latent.value_dim, call.products());
  return {a.inner, attended.rows, out_dim, out_dim};
}

}  // namespace edgeh2o
