// Both ends of latent attention on a device (model/mixers/latent.cc is that of the CPU).
#include "cuda/device_decoder.h"
#include "cuda/launches.h"

namespace edgeh2o::cuda {

void DeviceDecoder::project_latent(const Rows& rows, size_t layer) {
  const LayerSpec& spec = config_.layers[layer];
  const LayerWeights& w = weights_.host().layer(layer);
  const LatentHeads& latent = spec.latent;
  const size_t n_heads = spec.heads.n_heads, stride = spec.qkv_dim();
  const DeviceState& state = rows.state;
  float *const vectors = state.mixed_.as<float>(), *const heads = vectors + kRowsAtOnce * latent.q_rank,
               *const queries = rows.queries(spec);

  const bool has_vectors = latent.q_rank > 0;
  const Linear& from_input = has_vectors ? w.attn_q_a : w.attn_q;
  const Linear* const matrices[] = {&from_input, &w.attn_kv_a};
  const float* const input = begin_branch(rows, w.attn_norm, {matrices, 2});
  multiply(rows, from_input, input, has_vectors ? vectors : heads, weights_.n_out(from_input.weight));
  multiply(rows, w.attn_kv_a, input, queries + spec.heads.q_dim(), stride);
  if (has_vectors) {
    const bool has_floats = !is_quantised(w.attn_q);
    QuantisedRows q8 = rows_of(state.q8_, state.d8_, latent.q_rank);
    if (has_floats) q8.q = nullptr;
    device_->launch(
        "norm_rows",
        NormArguments{vectors, weights_.vector(w.attn_q_a_norm), has_floats ? vectors : nullptr, q8,
                      u32(latent.q_rank), 1, u32(latent.q_rank), u32(latent.q_rank), config_.norm_eps},
        rows.n, 1, 1, kNormThreads, kSmallShared);
    multiply(rows, w.attn_q, vectors, heads, n_heads * latent.head_dim());
  }
  const size_t head_dim = latent.head_dim();
  multiply_heads(rows, w.attn_k_b, {heads, n_heads * head_dim, head_dim},
                 {queries, stride, latent.row_dim()});

  const size_t n_pairs = latent.rope_dim / 2;
  LatentArguments a{};
  a.qkv = queries;
  a.heads = heads;
  a.cos = state.ropes_[spec.rope].as<float>() + rows.first * n_pairs;
  a.sin = a.cos + rows.sequence.shape().batch_size * n_pairs;
  a.norm = weights_.vector(w.attn_kv_a_norm);
  a.cache = state.cache(layer);
  a.n_heads = u32(n_heads);
  a.rank = u32(latent.rank);
  a.nope_dim = u32(latent.nope_dim);
  a.rope_dim = u32(latent.rope_dim);
  a.stride = u32(stride);
  a.start = state.start();
  a.first = u32(rows.first);
  a.eps = config_.norm_eps;
  device_->launch("latent_rows", a, n_heads + 1, rows.n, 1, kWarpSize, 0);
}

float* DeviceDecoder::latent_values(const Rows& rows, size_t layer) {
  const LayerSpec& spec = config_.layers[layer];
  const LatentHeads& latent = spec.latent;
  const size_t dim = attended_dim(spec), out_dim = spec.heads.n_heads * latent.value_dim;
  float* const values = rows.state.mixed_.as<float>();
  multiply_heads(rows, weights_.host().layer(layer).attn_v_b, {rows.attended(dim), dim, latent.rank},
                 {values, out_dim, latent.value_dim});
  return values;
}

void DeviceDecoder::multiply_heads(const Rows& rows, const std::vector<PackedMatrix>& heads,
                                   const HeadRows& input, const HeadRows& out) {
  const std::vector<DeviceWeights::HeadParts>& parts = weights_.heads(heads);
  const size_t n_heads = heads.size();
  const DeviceMatrix& first = parts[0].first;
  MultiplyArguments a{};
  a.x = input.x;
  a.x_stride = u32(input.stride);
  a.x_step = u32(input.step);
  if (is_tiled(first.format)) {  // every head's part by itself, padded to whole tiles
    a.xq = rows_of(rows.state.q8_, rows.state.d8_, first.depth);
    NormArguments round{};  // without a norm
    round.x = input.x;
    round.xq = a.xq;
    round.dim = first.depth;
    round.n_groups = u32(n_heads);
    round.x_stride = a.x_stride;
    round.group_stride = a.x_step;
    device_->launch("norm_rows", round, rows.n * n_heads, 1, 1, kNormThreads, kSmallShared);
    a.x_step = a.xq.padded;
    a.xq.padded *= u32(n_heads);
  }
  a.out = out.x;
  a.out_stride = u32(out.stride);
  a.out_step = u32(out.step);
  a.n_rows = u32(rows.n);
  for (size_t part = 0; part < parts.size(); ++part) {
    a.w = parts[part].first;
    if (takes_gemm(a.w, rows.n)) {  // few launches for many rows
      for (size_t head = 0; head < n_heads; ++head) {
        MultiplyArguments one = a;
        one.w = weights_.parts(heads[head])[part];
        one.xq.q += head * a.x_step;
        one.xq.d += head * a.x_step / 32;
        one.out += head * out.step;
        launch_multiply(one, 1);
      }
    } else {
      a.heads = parts[part].list;
      launch_multiply(a, n_heads);
    }
    a.out += a.w.n_out;
  }
}

}  // namespace edgeh2o::cuda
