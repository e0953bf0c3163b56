#include "model/mixers/attention.h"

#include <algorithm>

#include "model/branch.h"
#include "model/ffn/experts.h"
#include "model/ffn/gated.h"
#include "model/hidden_input.h"
#include "model/laurel.h"
#include "model/lent_rows.h"
#include "model/mixers/latent.h"
#include "model/mixers/mamba2.h"
#include "ops/chunk_plan.h"
#include "ops/rows.h"

namespace edgeh2o {
namespace {

struct Qkv {
  MatView<float> q, k, v;
  IndexRows index;
  Qkv rows_from(size_t first, size_t n) const {
    return {q.rows_from(first, n), k.rows_from(first, n), v.rows_from(first, n), index.rows_from(first, n)};
  }
};

void norm_qk(const LayerCall& call, const Qkv& qkv) {
  const LayerWeights& w = call.layer_weights();
  if (call.spec().qk_norm == QkNorm::kNone) return;
  if (call.spec().qk_norm == QkNorm::kLayer) {
    norm_sum(call, qkv.q, w.attn_q_norm, w.attn_q_norm_bias);
    norm_sum(call, qkv.k, w.attn_k_norm, w.attn_k_norm_bias);
    return;
  }
  const auto norm = [&](MatView<float> rows, const std::vector<float>& weight) {
    const size_t size = call.spec().qk_norm == QkNorm::kOwnHead ? call.spec().heads.key_dim : weight.size();
    rms_norm_groups(call.table(), rows, size, {weight.data(), weight.size()}, call.config.norm_eps);
  };
  norm(qkv.q, w.attn_q_norm);
  if (call.spec().heads.has_own_kv()) norm(qkv.k, w.attn_k_norm);
}

// Queries, keys and values of the rows x of a call, of which the first is row first_row of its buffers:
// normed and rotated.
void project_qkv(const LayerCall& call, MatView<float> x, size_t first_row, const Qkv& qkv) {
  const KernelTable& table = call.table();
  const LayerWeights& w = call.layer_weights();
  const LayerSpec& spec = call.spec();
  if (!spec.latent.is_none()) return project_latent(call, x, first_row, qkv.q, qkv.k, qkv.index);
  const size_t n = qkv.q.rows, stride = qkv.q.stride;
  const bool has_own_kv = spec.heads.has_own_kv();
  const Linear* gate = spec.has_gate_matrix() ? &w.attn_gate : &w.attn_q;
  const bool has_index = spec.heads.index.has_own();
  const Linear &index_q = has_index ? w.index_q : w.attn_q, &index_k = has_index ? w.index_k : w.attn_q;
  const size_t first_token = first_row - call.first_row;  // of the call's only step, where this is looked at
  const MatmulInput input =
      call.config.joins(HiddenJoin::kApart) ? join_apart(call, {call.step.tokens.data + first_token, n}, x,
                                                         {&w.attn_q, gate, &w.attn_k, &w.attn_v})
      : has_own_kv
          ? begin_branch(call, x, w.attn_norm, {&w.attn_q, gate, &w.attn_k, &w.attn_v, &index_q, &index_k},
                         w.attn_norm_bias)
          : begin_branch(call, x, w.attn_norm, {&w.attn_q, gate}, w.attn_norm_bias);
  MatmulOutput outputs[6] = {output_of(w.attn_q, qkv.q.data - spec.q_gate_dim(), stride)};
  size_t n_outputs = 1;
  if (has_own_kv) {
    outputs[n_outputs++] = output_of(w.attn_k, qkv.k.data, stride);
    outputs[n_outputs++] = output_of(w.attn_v, qkv.v.data, stride);
  }
  if (!w.attn_qkv_bias.empty()) {
    const float* bias = w.attn_qkv_bias.data();
    for (MatmulOutput& output : Span<MatmulOutput>{outputs, n_outputs}) {
      output.bias = bias;
      bias += output.weight->rows();
    }
  }
  if (spec.has_gate_matrix()) {
    outputs[n_outputs++] = output_of(w.attn_gate, qkv.q.data - spec.gate_dim(), stride);
  }
  if (has_index) {
    outputs[n_outputs++] = output_of(w.index_q, qkv.index.q.data, stride);
    outputs[n_outputs++] = output_of(w.index_k, qkv.index.k.data, stride);
  }
  matmul(table, input, {outputs, n_outputs}, call.products());
  if (has_index) finish_block_rows(call, first_row, qkv.index);
  scale_output(call, w.attn_q, qkv.q);
  scale_output(call, w.attn_k, qkv.k);
  scale_output(call, w.attn_v, qkv.v);

  if (spec.qkv_limit > 0.0f) {
    for (const MatView<float>& rows : {qkv.q, qkv.k, qkv.v})
      clamp_rows(rows, -spec.qkv_limit, spec.qkv_limit);
  }
  if (!spec.qk_norm_after_rope) norm_qk(call, qkv);
  const RopeTable& rope = call.buffers().ropes[spec.rope];
  const size_t n_pairs = call.config.rope(call.layer).n_pairs(), row = first_row * n_pairs;
  const size_t rotated_cols = qkv.q.cols + (has_own_kv ? qkv.k.cols : 0);
  rope_rows(table, {qkv.q.data, n, rotated_cols, stride}, rope.cos + row, rope.sin + row, spec.heads.key_dim,
            n_pairs);
  if (spec.qk_norm_after_rope) norm_qk(call, qkv);
  if (!w.query_gains.empty()) scale_columns(qkv.q, {w.query_gains.data(), w.query_gains.size()});
  if (!w.key_balance.empty()) {
    scale_columns({qkv.q.data, n, rotated_cols, stride}, {w.key_balance.data(), w.key_balance.size()});
  }
  if (has_own_kv && !w.attn_v_norm.empty()) {
    rms_norm_groups(table, qkv.v, {w.attn_v_norm.data(), w.attn_v_norm.size()}, call.config.norm_eps);
  }
  if (has_own_kv && spec.value_scale != 1.0f) scale_logits(table, qkv.v, spec.value_scale, 0.0f);
}

// What depends on the step that some rows are of, from row `first` of it on; keys and values go to the cache.
void take_rows(const LayerCall& call, size_t first, const Qkv& qkv) {
  const LayerSpec& spec = call.spec();
  if (spec.temperature_period > 0) {
    scale_by_position(call.table(), qkv.q, call.position() + first + spec.temperature_offset,
                      spec.temperature_scale, spec.temperature_period);
  }
  if (!spec.heads.has_own_kv()) return;
  call.step.sequence->layer(call.layer).append(as_const(qkv.k), as_const(qkv.v), as_const(qkv.index.k));
}

Qkv qkv_rows(const LayerCall& call, size_t n) {
  const AttentionHeads& heads = call.spec().heads;
  const size_t stride = call.spec().qkv_dim();
  float *q = call.buffers().qkv + call.spec().gate_dim(), *k = q + heads.q_dim(),
        *v = heads.values_are_keys ? k : k + heads.k_dim();
  return {{q, n, heads.q_dim(), stride},
          {k, n, heads.k_dim(), stride},
          {v, n, heads.v_dim(), stride},
          index_rows(call, n)};
}

// What attention gave as the input of the output projection; changed where it is normed.
MatmulInput output_input(const LayerCall& call, MatView<float> attended) {
  const LayerWeights& w = call.layer_weights();
  const PackedOut packed = packed_for(call, {&w.attn_output});
  if (!w.attn_sub_norm.empty()) {
    MatView<float> floats = attended;
    if (!packed.needs_floats) floats.data = nullptr;
    return norm_rows(call.table(), as_const(attended), row_norm(call.config, w.attn_sub_norm, {}),
                     {floats, packed}, call.buffers().scratch);
  }
  const MatView<const float> rows =
      call.spec().latent.is_none() ? as_const(attended) : latent_values(call, as_const(attended));
  return pack_rows(call.table(), rows, packed);
}

void set_sinks(const LayerCall& call) {
  const std::vector<float>& sinks = call.layer_weights().attn_sinks;
  call.step.sequence->layer(call.layer).set_sinks(sinks.empty() ? nullptr : sinks.data());
}

// Rows of a block, the first of them at `position`, which see each other, and as far as a window reaches
// before.
void attend_block(const LayerCall& call, MatView<const float> q, size_t position, MatView<float> out) {
  Sequence& sequence = *call.step.sequence;
  const AttentionPlan& plan = sequence.plan(call.layer);
  const LayerKv& kv = sequence.layer(call.layer).rows();
  const size_t window = call.spec().window, last = position + q.rows - 1;
  DecodeAttention attention(plan, call.workspace.attention_scratch(),
                            static_cast<size_t>(call.workspace.n_threads()));
  for (size_t token = 0; token < q.rows; ++token) {
    const size_t first = window > 0 && position + token >= window ? position + token + 1 - window : 0;
    for (size_t head = 0; head < plan.shape.heads.n_kv_heads; ++head) {
      attention.set_memory(token, head, MemorySet::all_of({first, last}), last, kv);
    }
  }
  attention.run(q, kv, out);
}

// The attention of rows that read one by one, the first of which is row `first` of the step.
void attend_rows(const LayerCall& call, const Qkv& rows, size_t first, MatView<float> out) {
  Sequence& sequence = *call.step.sequence;
  const bool is_decode = call.step.is_decode;
  uint8_t* scratch = call.workspace.attention_scratch();
  const auto n_threads = static_cast<size_t>(call.workspace.n_threads());
  const size_t position = call.position() + first;
  const MatView<const float> q = as_const(rows.q);
  if (!call.spec().heads.index.is_none()) {
    const ChosenPositions chosen = choose_positions(call, rows.index, first);
    sequence.read_chosen(call.layer, q, position, chosen, is_decode, scratch, n_threads, out);
    return;
  }
  if (call.config.joins(HiddenJoin::kCached)) return attend_block(call, q, position, out);
  const DecodeCall decode = sequence.decode_call(call.layer, is_decode, scratch, n_threads);
  const LayerKv kv = sequence.layer(call.layer).rows();
  const size_t window = call.spec().window;
  if (!call.spec().is_chunked) return decode.run(q, kv, position, window, out);
  for_each_chunk(position, q.rows, window, [&](size_t begin, size_t n, size_t start) {
    decode.run(q.rows_from(begin, n), kv.from(start), position + begin - start, window,
               out.rows_from(begin, n));
  });
}

// Adds to rows x what is made of `attended`, their attention; qkv are theirs.
void add_attended(const LayerCall& call, MatView<float> x, const Qkv& qkv, MatView<float> attended) {
  const LayerWeights& w = call.layer_weights();
  const LayerSpec& spec = call.spec();
  const auto gated = [&] {
    const MatView<const float> gate{qkv.q.data - spec.gate_dim(), x.rows, spec.gate_dim(), qkv.q.stride};
    if (spec.output_gate == OutputGate::kPerHead) {
      gate_heads(spec.head_gate, gate, attended);
      return output_input(call, attended);
    }
    const PackedOut packed = packed_for(call, {&w.attn_output});
    MatView<float> floats = attended;
    if (!packed.needs_floats) floats.data = nullptr;
    return gate_rows(call.table(), call.table().gate_f32, gate, as_const(attended), {floats, packed},
                     call.buffers().scratch);
  };
  if (spec.laurel_rank > 0) add_laurel(call, x);
  // What queries, keys and values were is no longer needed: there the input is kept.
  const MatView<float> input{qkv.q.data, x.rows, x.cols, qkv.q.stride};
  if (spec.has_second_norm) copy_rows(as_const(x), input);
  end_branch(call, x, spec.has_output_gate() ? gated() : output_input(call, attended), w.attn_output,
             w.attn_post_norm);
  norm_sum(call, x, w.attn_sum_norm, w.attn_sum_norm_bias);
  if (spec.has_second_norm) {
    add_rows(call.table(), x, input, nullptr, 0.0f, 1.0f);
    norm_sum(call, x, w.second_norm, w.second_norm_bias);
  }
  if (spec.laurel_rank > 0) scale_branches(call, x);
}

// The feed-forward network that has the input of attention.
void add_beside(const LayerCall& call, MatView<float> x) {
  call.spec().ffn == FfnKind::kExperts ? add_experts(call, x) : add_gated(call, x);
}

}  // namespace

bool skips_attention(const DecoderConfig& config, const Sequence& sequence, size_t layer) {
  return sequence.attends(layer) && LayerCall::skips_rows(config, sequence, layer) &&
         sequence.plan(layer).ends_dense(config.layers[layer].window);
}

size_t n_attending_layers(const DecoderConfig& config, const Sequence& sequence) {
  size_t n = config.n_layers();
  while (n > 0 && (!sequence.attends(n - 1) || skips_attention(config, sequence, n - 1))) --n;
  return n;
}

size_t first_input_row(const LayerCall& call) {
  const bool is_row = call.step.is_decode || skips_attention(call.config, *call.step.sequence, call.layer);
  return is_row && !call.spec().heads.has_own_kv() ? call.first_output_row() : 0;
}

void cache_hidden(const LayerCall& call) {
  const LayerWeights& w = call.layer_weights();
  const size_t n = call.step.tokens.size, n_pairs = call.config.rope(call.layer).n_pairs();
  const Qkv qkv = qkv_rows(call, n);
  const RopeTable& rope = call.buffers().ropes[call.spec().rope];
  for (size_t begin = 0; begin < n; begin += call.buffers().rows_at_once) {
    const Qkv rows = qkv.rows_from(begin, std::min(call.buffers().rows_at_once, n - begin));
    const size_t stride = rows.k.stride, row = (call.first_row + begin) * n_pairs;
    const MatmulInput input =
        begin_branch(call, call.x().rows_from(begin, rows.k.rows), {}, {&w.attn_k, &w.attn_v});
    const MatmulOutput outputs[2] = {output_of(w.attn_k, rows.k.data, stride),
                                     output_of(w.attn_v, rows.v.data, stride)};
    matmul(call.table(), input, {outputs, 2}, call.products());
    rms_norm_groups(call.table(), rows.k, w.attn_k_norm.size(), {w.attn_k_norm.data(), w.attn_k_norm.size()},
                    call.config.norm_eps);
    rope_rows(call.table(), rows.k, rope.cos + row, rope.sin + row, call.spec().heads.key_dim, n_pairs);
    take_rows(call, begin, rows);
  }
}

// One row reads what lies in the cache of another model before its position.
void mix_lent(const LayerCall& call) {
  const LayerSpec& spec = call.spec();
  const size_t out_dim = spec.heads.out_dim(), position = call.position();
  const MatView<float> attended{call.buffers().attended, 1, out_dim, out_dim};
  const Qkv qkv = qkv_rows(call, 1);
  project_qkv(call, call.x(), 0, qkv);
  call.step.lent->attend(call.layer, as_const(qkv.q), call.step.sequence->layer(spec.lender).rows(), position,
                         spec.window, call.workspace.attention_scratch(),
                         static_cast<size_t>(call.workspace.n_threads()), attended);
  add_attended(call, call.x(), qkv, attended);
}

void mix_attention(const LayerCall& call, const Observer& observer) {
  if (call.spec().heads.are_lent) return mix_lent(call);
  const LayerSpec& spec = call.spec();
  const Step& step = call.step;
  Sequence& sequence = *step.sequence;
  Activations& a = call.buffers();
  const size_t n = step.tokens.size, out_dim = spec.heads.out_dim();
  const size_t first = call.first_output_row(), first_answer = call.first_answer_row();
  const Qkv qkv = qkv_rows(call, n);
  const bool is_row = step.is_decode || skips_attention(call.config, sequence, call.layer);
  // Keys and values of all rows are stored, if they are the layer's own.
  for (size_t begin = first_input_row(call); begin < n; begin += a.rows_at_once) {
    const Qkv rows = qkv.rows_from(begin, std::min(a.rows_at_once, n - begin));
    project_qkv(call.from(begin), call.x().rows_from(begin, rows.q.rows), call.first_row + begin, rows);
    take_rows(call, begin, rows);
  }
  // Beside the attention, from the same rows of x: to these it adds once they have been projected.
  if (spec.has_ssd()) mix_mamba2(call);
  const MatView<const float> queries = as_const(qkv.q);
  const MatView<float> attended{a.attended, n, out_dim, out_dim};
  set_sinks(call);
  uint8_t* scratch = call.workspace.attention_scratch();
  const auto n_threads = static_cast<size_t>(call.workspace.n_threads());
  const bool has_queries = !is_row || spec.heads.has_own_kv();  // of all rows
  if (!step.is_decode && has_queries && spec.window == 0 && sequence.observes(call.layer)) {
    sequence.observe(call.layer, queries, scratch, n_threads);
  }
  if (is_row) {
    if (!step.is_decode && has_queries) {
      sequence.sample(call.layer, queries, spec.window, step.end, scratch, n_threads);
    }
    if (first == n) return;
    // Rows that no answer is made of, in the kernels of prompts; those that it is made of as without them.
    // With an indexer each reads what it has chosen.
    const size_t first_alone = spec.heads.index.is_none() ? first_answer : first;
    if (first < first_alone) {
      sequence.attend_aside(call.layer, queries, spec.window, step.end, scratch, n_threads, attended);
    }
    const size_t count = n - first_alone;
    if (count > 0) {
      attend_rows(call, qkv.rows_from(first_alone, count), first_alone,
                  attended.rows_from(first_alone, count));
    }
  } else if (!spec.heads.index.is_none()) {
    const ChosenPositions chosen = choose_positions(call, qkv.index, 0);
    sequence.attend_chosen(call.layer, queries, chosen, step.end, scratch, n_threads, attended);
  } else {
    sequence.attend(call.layer, queries, spec.window, step.end, scratch, n_threads, attended);
  }
  const MatView<float> x = call.x();
  if (observer.on_attention && !is_row) {
    observer.on_attention(
        {call.layer, as_const(x), queries, as_const(qkv.k), as_const(qkv.v), as_const(attended)});
  }
  if (spec.is_parallel) {  // from x as attention has read it
    for (size_t begin = first; begin < n; begin += a.rows_at_once) {
      add_beside(call.from(begin), x.rows_from(begin, std::min(a.rows_at_once, n - begin)));
    }
  }
  for (size_t begin = first; begin < n; begin += a.rows_at_once) {
    const size_t count = std::min(a.rows_at_once, n - begin);
    add_attended(call.from(begin), x.rows_from(begin, count), qkv.rows_from(begin, count),
                 attended.rows_from(begin, count));
  }
}

void mix_attentions(const LayerCall& call, Span<const Step> steps, MatView<float> x) {
  const LayerSpec& spec = call.spec();
  const size_t out_dim = spec.heads.out_dim();
  const MatView<float> attended{call.buffers().attended, x.rows, out_dim, out_dim};
  const Qkv qkv = qkv_rows(call, x.rows);
  project_qkv(call, x, 0, qkv);
  if (spec.has_ssd()) mix_mamba2s(call, steps, x);
  if (spec.is_parallel) add_beside(call, x);
  for_each_step(call, steps, [&](const LayerCall& one) {
    const Qkv rows = qkv.rows_from(one.first_row, one.step.tokens.size);
    take_rows(one, 0, rows);
    set_sinks(one);
    attend_rows(one, rows, 0, attended.rows_from(one.first_row, rows.q.rows));
  });
  add_attended(call, x, qkv, attended);
}

}  // namespace edgeh2o
