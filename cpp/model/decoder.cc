#include "model/decoder.h"

#include <algorithm>

#include "base/parallel.h"
#include "ops/matmul.h"
#include "ops/rows.h"

namespace edgeh2o {
namespace {

// Rows that pass the linear layers at a time, to find them in a cache at every step: the row block of a
// matrix product. Gate and up of 192 x 1,536 are 2.4 MB.
constexpr size_t kRowsAtOnce = 192;
// With experts more, because each of them gets a few of the rows only: 64 of 1,024 with 8 of 128.
constexpr size_t kExpertRowsAtOnce = 1024;

bool any_float(std::initializer_list<const Linear*> layers) {
  return std::any_of(layers.begin(), layers.end(), [](const Linear* l) { return !l->weight.is_quantised(); });
}
bool any_quantised(std::initializer_list<const Linear*> layers) {
  return std::any_of(layers.begin(), layers.end(), [](const Linear* l) { return l->weight.is_quantised(); });
}

MatmulOutput to(const Linear& linear, float* out, size_t stride, bool accumulate = false) {
  return {&linear.weight, linear.bias.empty() ? nullptr : linear.bias.data(), out, stride, accumulate};
}

}  // namespace

Activations::Activations(const DecoderConfig& config, const KernelTable& table, size_t batch_size,
                         Arena& arena)
    : rows_at_once(std::min(config.n_experts > 0 ? kExpertRowsAtOnce : kRowsAtOnce, batch_size)),
      n_threads(num_threads()),
      routes(rows_at_once, config.n_experts, config.n_experts_used, arena) {
  const size_t n = batch_size, widest = std::max({config.model_dim, config.q_dim(), config.ffn_dim});
  x = arena.take<float>(n * config.model_dim);
  norm = arena.take<float>(rows_at_once * config.model_dim);
  qkv = arena.take<float>(n * (config.q_dim() + 2 * config.kv_dim()));
  attended = arena.take<float>(n * config.q_dim());
  gate = arena.take<float>(rows_at_once * config.ffn_dim);
  up = arena.take<float>(rows_at_once * config.ffn_dim);
  packed = arena.take<uint8_t>(Activations8::bytes(table, rows_at_once, widest));
  const auto take_table = [&](const RopeConfig& table) -> RopeTable {
    float* cos = arena.take<float>(n * table.n_pairs());
    return {cos, arena.take<float>(n * table.n_pairs())};
  };
  rope = take_table(config.rope);
  sliding_rope = take_table(config.sliding_rope);
  logits = arena.take<float>(config.vocab_size);
  const size_t n_mixed = config.n_experts > 0 ? rows_at_once * config.model_dim : 0;
  router = arena.take<float>(rows_at_once * config.n_experts);
  expert_rows = arena.take<float>(n_mixed);
  expert_input = arena.take<float>(n_mixed);
  mixed = arena.take<float>(n_mixed);
  scratch = arena.take<uint8_t>(static_cast<size_t>(n_threads) *
                                std::max(matmul_scratch_bytes(table), row_scratch_bytes(table, widest)));
}

void Decoder::embed(Activations& a, const int32_t* tokens, size_t n_tokens) const {
  const size_t dim = config_.model_dim;
  parallel_for(n_tokens, [&](size_t i, size_t) {
    float* row = a.x + i * dim;
    weights_.token_embd().dequantize_row(row, static_cast<size_t>(tokens[i]));
    if (config_.embedding_scale != 1.0f) weights_.table().scale_f32(row, row, config_.embedding_scale, dim);
  });
}

void Decoder::fill_rope_tables(const Step& step, size_t max_context, Activations& a) const {
  const auto fill = [&](const RopeTable& table, const RopeConfig& rope) {
    fill_rope_table(table.cos, table.sin, step.first_position, step.n_tokens,
                    {rope.inv_freq.data(), rope.n_pairs()}, rope.attention_factor);
  };
  fill(a.rope, config_.rope_of_context(max_context));
  if (config_.has_sliding_rope()) fill(a.sliding_rope, config_.sliding_rope);
}

void Decoder::run_layers(const Step& step, Activations& a, KvCache& cache, ChunkedAttention& attention,
                         const Observer& observer) const {
  fill_rope_tables(step, cache.shape().max_context, a);
  for (size_t layer = 0; layer < config_.n_layers; ++layer) {
    attend(layer, step, a, cache, attention, observer);
    feed_forward(weights_.layer(layer), first_output_row(layer, step), step.n_tokens, a);
    if (observer.on_layer) observer.on_layer(layer + 1, config_.n_layers);
  }
}

// Rows of the residual stream that nobody reads after the last layer are left as they are.
size_t Decoder::first_output_row(size_t layer, const Step& step) const {
  if (!outputs_last_row_only(layer, step.all_rows)) return 0;
  return step.end == PromptEnd::kLater ? step.n_tokens : step.n_tokens - 1;
}

// Queries, keys and values of some rows of the call: normed, rotated, and written to the cache.
void Decoder::project_qkv(size_t layer, PositionRange rows, const Step& step, Activations& a,
                          KvCache& cache) const {
  const KernelTable& table = weights_.table();
  const LayerWeights& w = weights_.layer(layer);
  const size_t n = rows.size(), dim = config_.model_dim, q_dim = config_.q_dim(), kv_dim = config_.kv_dim();
  const size_t qkv_dim = q_dim + 2 * kv_dim;
  float *q = a.qkv + rows.begin * qkv_dim, *k = q + q_dim, *v = k + kv_dim;

  const MatView<float> x{a.x + rows.begin * dim, n, dim, dim};
  const MatmulInput input = begin_branch(x, w.attn_norm, {&w.attn_q, &w.attn_k, &w.attn_v}, a);
  const MatmulOutput qkv[] = {to(w.attn_q, q, qkv_dim), to(w.attn_k, k, qkv_dim), to(w.attn_v, v, qkv_dim)};
  matmul(table, input, {qkv, 3}, a.scratch);

  if (config_.qk_norm != QkNorm::kNone) {
    rms_norm_groups(table, {q, n, q_dim, qkv_dim}, {w.attn_q_norm.data(), w.attn_q_norm.size()},
                    config_.norm_eps);
    rms_norm_groups(table, {k, n, kv_dim, qkv_dim}, {w.attn_k_norm.data(), w.attn_k_norm.size()},
                    config_.norm_eps);
  }
  const RopeTable& rope = config_.window(layer) > 0 && config_.has_sliding_rope() ? a.sliding_rope : a.rope;
  const size_t n_pairs = config_.rope.n_pairs();
  rope_rows(table, {q, n, q_dim + kv_dim, qkv_dim}, rope.cos + rows.begin * n_pairs,
            rope.sin + rows.begin * n_pairs, config_.head_dim, n_pairs);
  cache.write(layer, step.first_position + rows.begin, {k, n, kv_dim, qkv_dim}, {v, n, kv_dim, qkv_dim});
}

// x += attn_output(attention(rope(q), rope(k), v)) from the first output row on, with the norms that the
// model has
void Decoder::attend(size_t layer, const Step& step, Activations& a, KvCache& cache,
                     ChunkedAttention& attention, const Observer& observer) const {
  const KernelTable& table = weights_.table();
  const LayerWeights& w = weights_.layer(layer);
  const size_t n = step.n_tokens, dim = config_.model_dim, q_dim = config_.q_dim(), kv_dim = config_.kv_dim();
  const size_t qkv_dim = q_dim + 2 * kv_dim, window = config_.window(layer);
  const size_t first = first_output_row(layer, step), n_out = n - first;
  float *q = a.qkv, *k = q + q_dim, *v = k + kv_dim;

  const MatView<float> x{a.x, n, dim, dim};
  for (size_t begin = 0; begin < n; begin += a.rows_at_once) {
    project_qkv(layer, {begin, std::min(begin + a.rows_at_once, n)}, step, a, cache);
  }
  const MatView<const float> queries{q, n, q_dim, qkv_dim};
  const MatView<float> attended{a.attended, n, q_dim, q_dim};
  if (step.is_decode || skips_attention(layer, step.all_rows, attention)) {
    if (n_out == 0) return;
    attention.decode(queries.rows_from(first, 1), cache.view(layer), step.first_position + first, window,
                     attended.rows_from(first, 1));
  } else {
    attention.run(layer, queries, cache.view(layer), step.first_position, window, step.end, attended);
  }
  if (observer.on_attention && !step.is_decode) {
    observer.on_attention({layer,
                           {a.x, n, dim, dim},
                           queries,
                           {k, n, kv_dim, qkv_dim},
                           {v, n, kv_dim, qkv_dim},
                           {a.attended, n, q_dim, q_dim}});
  }

  uint8_t* packed = w.attn_output.weight.is_quantised() ? a.packed : nullptr;
  for (size_t begin = first; begin < n; begin += a.rows_at_once) {
    const size_t count = std::min(a.rows_at_once, n - begin);
    const MatmulInput input = pack_rows(table, {attended.row(begin), count, q_dim, q_dim}, packed);
    end_branch(x.rows_from(begin, count), input, w.attn_output, w.attn_post_norm, a);
  }
}

// x += down(activation(gate(x)) * up(x)), with the norms that the model has
void Decoder::feed_forward(const LayerWeights& w, size_t first_row, size_t n_tokens, Activations& a) const {
  const size_t dim = config_.model_dim;
  for (size_t first = first_row; first < n_tokens; first += a.rows_at_once) {
    const MatView<float> x{a.x + first * dim, std::min(a.rows_at_once, n_tokens - first), dim, dim};
    if (config_.n_experts > 0) {
      mix_experts(w, x, a);
      continue;
    }
    const FeedForward& ffn = w.ffn[0];
    const MatmulInput input = begin_branch(x, w.ffn_norm, {&ffn.gate, &ffn.up}, a);
    end_branch(x, gate_up(ffn, input, a), ffn.down, w.ffn_post_norm, a);
  }
}

MatmulInput Decoder::gate_up(const FeedForward& ffn, const MatmulInput& input, Activations& a) const {
  const KernelTable& table = weights_.table();
  const size_t n = input.rows.rows, ffn_dim = config_.ffn_dim;
  const GateKernel activation =
      config_.activation == Activation::kGeluTanh ? table.geglu_f32 : table.swiglu_f32;
  const MatmulOutput gate_up[] = {to(ffn.gate, a.gate, ffn_dim), to(ffn.up, a.up, ffn_dim)};
  matmul(table, input, {gate_up, 2}, a.scratch);
  const bool is_quantised = ffn.down.weight.is_quantised();
  const ActivationsOut product{{is_quantised ? nullptr : a.gate, n, ffn_dim, ffn_dim},
                               is_quantised ? a.packed : nullptr};
  return gate_rows(table, activation, {a.gate, n, ffn_dim, ffn_dim}, {a.up, n, ffn_dim, ffn_dim}, product,
                   a.scratch);
}

void Decoder::mix_experts(const LayerWeights& w, MatView<float> x, Activations& a) const {
  const KernelTable& table = weights_.table();
  const size_t n = x.rows, dim = x.cols, n_experts = config_.n_experts;
  const MatView<float> normed{a.expert_input, n, dim, dim}, mixed{a.mixed, n, dim, dim};
  if (w.ffn_norm.empty()) {
    std::copy_n(x.data, n * dim, normed.data);
  } else {
    rms_norm_rows(table, {x.data, n, dim, x.stride}, w.ffn_norm.data(), config_.norm_eps, {normed},
                  a.scratch);
  }
  const auto packed_for = [&](const Linear& linear) {
    return linear.weight.is_quantised() ? a.packed : nullptr;
  };
  const MatView<const float> rows{normed.data, n, dim, dim};
  const MatmulOutput router = to(w.ffn_router, a.router, n_experts);
  matmul(table, pack_rows(table, rows, packed_for(w.ffn_router)), {&router, 1}, a.scratch);
  route_rows({a.router, n, n_experts, n_experts}, a.routes);

  std::fill_n(mixed.data, n * dim, 0.0f);
  for (size_t e = 0; e < n_experts; ++e) {  // one after the other: sums have a fixed order
    const size_t first = a.routes.begin[e], count = a.routes.begin[e + 1] - first;
    if (count == 0) continue;
    const FeedForward& ffn = w.ffn[e];
    const MatView<float> part{a.expert_rows, count, dim, dim};
    gather_rows(rows, a.routes.rows + first, part);
    uint8_t* packed = any_quantised({&ffn.gate, &ffn.up}) ? a.packed : nullptr;
    const MatmulInput product = gate_up(ffn, pack_rows(table, {part.data, count, dim, dim}, packed), a);
    const MatmulOutput down = to(ffn.down, part.data, dim);
    matmul(table, product, {&down, 1}, a.scratch);
    scatter_rows({part.data, count, dim, dim}, a.routes.rows + first, a.routes.weights + first, mixed);
  }
  add_rows(table, x, mixed, w.ffn_post_norm.empty() ? nullptr : w.ffn_post_norm.data(), config_.norm_eps,
           config_.residual_scale);
}

MatmulInput Decoder::begin_branch(MatView<float> x, const std::vector<float>& pre_norm,
                                  std::initializer_list<const Linear*> layers, Activations& a) const {
  const KernelTable& table = weights_.table();
  uint8_t* packed = any_quantised(layers) ? a.packed : nullptr;
  if (pre_norm.empty()) return pack_rows(table, {x.data, x.rows, x.cols, x.stride}, packed);
  const ActivationsOut norm{{any_float(layers) ? a.norm : nullptr, x.rows, x.cols, x.cols}, packed};
  return rms_norm_rows(table, {x.data, x.rows, x.cols, x.stride}, pre_norm.data(), config_.norm_eps, norm,
                       a.scratch);
}

void Decoder::end_branch(MatView<float> x, const MatmulInput& input, const Linear& linear,
                         const std::vector<float>& post_norm, Activations& a) const {
  const KernelTable& table = weights_.table();
  const bool is_plain = post_norm.empty() && config_.residual_scale == 1.0f;
  const MatmulOutput output = to(linear, is_plain ? x.data : a.norm, x.stride, is_plain);
  matmul(table, input, {&output, 1}, a.scratch);
  if (is_plain) return;
  add_rows(table, x, {a.norm, x.rows, x.cols, x.stride}, post_norm.empty() ? nullptr : post_norm.data(),
           config_.norm_eps, config_.residual_scale);
}

void Decoder::compute_logits(Activations& a, size_t first, size_t n_rows, float* out) const {
  for (size_t begin = 0; begin < n_rows; begin += a.rows_at_once) {
    const size_t count = std::min(a.rows_at_once, n_rows - begin);
    compute_some_logits(a, first + begin, count, out + begin * config_.vocab_size);
  }
}

void Decoder::compute_some_logits(Activations& a, size_t first, size_t n_rows, float* out) const {
  const KernelTable& table = weights_.table();
  const PackedMatrix& head = weights_.output();
  const size_t dim = config_.model_dim;
  const MatView<float> norm{a.norm, n_rows, dim, dim};
  const MatmulInput normed =
      rms_norm_rows(table, {a.x + first * dim, n_rows, dim, dim}, weights_.output_norm().data(),
                    config_.norm_eps, {norm, head.is_quantised() ? a.packed : nullptr}, a.scratch);
  const MatmulOutput logits{&head, nullptr, out, config_.vocab_size, false};
  matmul(table, normed, {&logits, 1}, a.scratch);
  if (config_.logit_scale == 1.0f && config_.logit_soft_cap == 0.0f) return;
  parallel_for(n_rows, [&](size_t i, size_t) {
    float* row = out + i * config_.vocab_size;
    table.scale_f32(row, row, config_.logit_scale, config_.vocab_size);
    if (config_.logit_soft_cap > 0.0f) table.soft_cap_f32(row, config_.logit_soft_cap, config_.vocab_size);
  });
}

}  // namespace edgeh2o
