// Attention of the layer loop on a device: to everything, or as a sparse rule chooses (see
// ops/chunked_attention.h, whose order of calls to the rule this keeps).
#include <algorithm>

#include "cuda/device_decoder.h"
#include "cuda/launches.h"
#include "model/mixers/attention.h"
#include "ops/chunk_plan.h"

namespace edgeh2o::cuda {
namespace {

DeviceHeads heads_of(const LayerSpec& spec) {
  const AttentionHeads& heads = spec.heads;
  return {u32(heads.n_heads), u32(heads.n_kv_heads), u32(heads.key_dim),
          u32(attended_dim(spec) / heads.n_heads), u32(heads.value_dim)};
}

KeyList keys_from(size_t position) {
  KeyList keys{};
  keys.lowest = u32(position);
  return keys;
}

// Of the states of a chunk's own part, or of its memory.
size_t part_floats(const AttentionPlan& plan, size_t n_heads) {
  return plan.shape.longest_chunk() * n_heads * 2;
}

RowWeight row_weight(QueryWeights weights) {
  switch (weights) {
    case QueryWeights::kOne:
      return RowWeight::kOne;
    case QueryWeights::kVisibleKeys:
      return RowWeight::kVisibleKeys;
    case QueryWeights::kLastQueries:
      return RowWeight::kLastRows;
  }
  return RowWeight::kOne;
}

}  // namespace

// Attention of all rows; what comes out is wanted of `outputs`.
bool DeviceDecoder::attend(const Rows& rows, const Rows& outputs, size_t layer, bool is_decode,
                           PromptEnd end) {
  const LayerSpec& spec = config_.layers[layer];
  const bool is_row = !is_decode && skips_attention(config_, rows.sequence, layer);
  for_groups(is_row && !spec.heads.has_own_kv() ? outputs : rows,
             [&](const Rows& group) { project_qkv(group, layer); });
  // Beside the attention, from the same rows; what comes out is added before that of the attention.
  if (spec.has_ssd()) mix_recurrent(rows, outputs, layer);
  const bool asks_rule =
      is_decode ? rows.sequence.policy().chooses_in_decode() : !rows.sequence.plan(layer).needs.reads_all;
  const size_t out_dim = attended_dim(spec);
  if (is_row) {
    attend_to_all(outputs, layer, outputs.attended(out_dim));
  } else if (spec.window > 0 || !asks_rule) {
    const QuantisedRows rounded = is_decode ? rounds_to(rows, layer) : QuantisedRows{};
    attend_to_all(rows, layer, rounded.q ? nullptr : rows.attended(out_dim), rounded);
    if (rounded.q) return true;
    const uint64_t n_pairs = causal_pairs(rows.position, rows.n, spec.window);
    if (!is_decode) rows.sequence.count_pairs(n_pairs * spec.heads.n_kv_heads, n_pairs);
  } else if (is_decode) {
    attend_token(rows, layer);
  } else {
    attend_under_guard(rows, layer, end);
  }
  return false;
}

QuantisedRows DeviceDecoder::rounds_to(const Rows& rows, size_t layer) const {
  const LayerSpec& spec = config_.layers[layer];
  static_assert(kAttendRows < kTilesFromRows);  // by tiles nothing is rounded
  const bool fits = rows.n <= kAttendRows && spec.heads.value_dim % 32 == 0 &&
                    spec.heads.out_dim() % kTileDepth == 0 && spec.latent.is_none() &&
                    !spec.has_output_gate();
  if (!fits || !is_quantised(weights_.host().layer(layer).attn_output)) return {};
  return rows_of(rows.state.q8_, rows.state.d8_, spec.heads.out_dim());
}

// Queries, keys and values: normed, rotated, and written to the cache.
void DeviceDecoder::project_qkv(const Rows& rows, size_t layer) {
  const LayerSpec& spec = config_.layers[layer];
  if (!spec.latent.is_none()) return project_latent(rows, layer);
  const LayerWeights& w = weights_.host().layer(layer);
  const AttentionHeads& heads = spec.heads;
  const size_t stride = spec.qkv_dim();
  const bool has_own_kv = heads.has_own_kv();
  float *const qkv = rows.qkv(spec), *const queries = rows.queries(spec);
  std::vector<const Linear*> matrices = {&w.attn_q};
  if (has_own_kv) matrices.insert(matrices.end(), {&w.attn_k, &w.attn_v});
  const float* const input = begin_branch(rows, w.attn_norm, {matrices.data(), matrices.size()});
  std::vector<Product> products;
  float* out = qkv;
  for (const Linear* linear : matrices) {
    products.push_back({linear, out});
    out += weights_.n_out(linear->weight);
  }
  multiply_all(rows, {products.data(), products.size()}, input, stride);
  if (spec.qk_norm != QkNorm::kNone && !spec.qk_norm_after_rope) {
    const float eps = config_.norm_eps;
    norm_groups(rows, queries, heads.q_dim(), stride, w.attn_q_norm, eps);
    if (has_own_kv) norm_groups(rows, queries + heads.q_dim(), heads.k_dim(), stride, w.attn_k_norm, eps);
  }
  rotate(rows, layer);
}

void DeviceDecoder::rotate(const Rows& rows, size_t layer) {
  const LayerSpec& spec = config_.layers[layer];
  const LayerWeights& w = weights_.host().layer(layer);
  const AttentionHeads& heads = spec.heads;
  const size_t n_pairs = config_.rope(layer).n_pairs();
  const DeviceState& state = rows.state;
  RopeArguments a{};
  a.qkv = rows.queries(spec);
  a.cos = state.ropes_[spec.rope].as<float>() + rows.first * n_pairs;
  a.sin = a.cos + rows.sequence.shape().batch_size * n_pairs;
  a.cache = state.cache(layer);
  a.heads = heads_of(spec);
  a.stride = u32(spec.qkv_dim());
  a.n_pairs = u32(n_pairs);
  a.start = state.start();
  a.first = u32(rows.first);
  a.norms_values = spec.norms_values;
  if (spec.qk_norm_after_rope) {
    a.q_norm = weights_.vector(w.attn_q_norm);
    a.k_norm = weights_.vector(w.attn_k_norm);
  }
  if (spec.temperature_period > 0) a.q_factors = state.query_factors_.as<float>() + rows.first;
  a.eps = config_.norm_eps;
  device_->launch("rope_rows", a, heads.n_heads + (heads.has_own_kv() ? 2 * heads.n_kv_heads : 0), rows.n, 1,
                  kWarpSize, 0);
}

void DeviceDecoder::add_attended(const Rows& rows, size_t layer, bool is_rounded) {
  const LayerSpec& spec = config_.layers[layer];
  const LayerWeights& w = weights_.host().layer(layer);
  const bool is_latent = !spec.latent.is_none();
  const size_t out_dim = is_latent ? spec.heads.n_heads * spec.latent.value_dim : spec.heads.out_dim();
  float* const attended = is_latent ? latent_values(rows, layer) : rows.attended(out_dim);
  if (spec.has_output_gate()) {
    gate_by(rows, rows.qkv(spec), spec.qkv_dim(), attended, out_dim, GateKind::kSigmoid, w.attn_output);
  } else if (!is_rounded) {
    quantise(rows, attended, out_dim, w.attn_output);
  }
  end_branch(rows, attended, w.attn_output, w.attn_post_norm, spec.residual_scale);
}

AttendArguments DeviceDecoder::attend_arguments(const Rows& rows, size_t layer) const {
  const LayerSpec& spec = config_.layers[layer];
  const AttentionHeads& heads = spec.heads;
  AttendArguments a{};
  a.qkv = rows.queries(spec);
  a.cache = rows.state.cache(layer);
  a.heads = heads_of(spec);
  a.parts = rows.state.parts_.as<float>();
  a.states = rows.state.states_.as<float>();
  a.stride = u32(spec.qkv_dim());
  a.start = rows.state.start();
  a.first = u32(rows.first);
  a.scale = heads.scale;
  a.soft_cap = heads.soft_cap;
  return a;
}

void DeviceDecoder::launch_attend(AttendArguments a, size_t n_ranges, size_t n_rows) {
  const size_t group = a.heads.n_heads / a.heads.n_kv_heads, n_heads = attend_heads(group, a.heads.key_dim);
  a.block_heads = u32(n_heads);
  device_->launch("attend_split", a, n_ranges, a.heads.n_kv_heads * ceil_div(group, n_heads), n_rows,
                  kThreads, n_heads * attend_head_bytes(a.heads.key_dim) + kAttendScratchBytes);
}

size_t DeviceDecoder::tile_dim_of(const Rows& rows, size_t layer) const {
  const LayerSpec& spec = config_.layers[layer];
  return rows.n < kTilesFromRows ? 0 : tile_dim(heads_of(spec), rows.state.cache(layer), spec.qkv_dim());
}

AttendTilesArguments DeviceDecoder::tiles_arguments(const Rows& rows, size_t layer, float* out) const {
  const AttendArguments rows_of_layer = attend_arguments(rows, layer);
  AttendTilesArguments a{};
  a.qkv = rows_of_layer.qkv;
  a.heads = rows_of_layer.heads;
  a.lists[0].cache = rows_of_layer.cache;
  a.n_lists = 1;
  a.out = out;
  a.sinks = weights_.vector(weights_.host().layer(layer).attn_sinks);
  a.stride = rows_of_layer.stride;
  a.first = u32(rows.position);
  a.n_rows = u32(rows.n);
  a.out_stride = u32(attended_dim(config_.layers[layer]));
  a.scale = rows_of_layer.scale;
  a.soft_cap = rows_of_layer.soft_cap;
  return a;
}

void DeviceDecoder::launch_tiles(const AttendTilesArguments& a, size_t dim) {
  device_->launch(attend_tiles_kernel(dim), a, ceil_div(size_t{a.n_rows}, size_t{kAttendTile}),
                  a.heads.n_heads, 1, kThreads, attend_tiles_bytes(dim));
}

void DeviceDecoder::attend_to_all(const Rows& rows, size_t layer, float* out, const QuantisedRows& rounded) {
  const LayerSpec& spec = config_.layers[layer];
  if (const size_t width = tile_dim_of(rows, layer); width > 0) {
    AttendTilesArguments a = tiles_arguments(rows, layer, out);
    a.lists[0].keys.window = u32(spec.window);
    return launch_tiles(a, width);
  }
  for (size_t begin = 0; begin < rows.n; begin += kAttendRows) {
    const Rows some = rows.part(begin, std::min(kAttendRows, rows.n - begin));
    const size_t n_keys = some.position + some.n;
    AttendArguments a = attend_arguments(some, layer);
    a.keys.window = u32(spec.window);
    attend_in_ranges(a, layer, spec.window ? std::min(spec.window, n_keys) : n_keys, some.n,
                     out ? out + begin * attended_dim(spec) : nullptr, rounded);
  }
}

void DeviceDecoder::attend_in_ranges(AttendArguments a, size_t layer, size_t n_keys, size_t n_rows,
                                     float* out, const QuantisedRows& rounded) {
  const size_t n_ranges = ranges_of(n_keys);
  a.n_splits = u32(n_ranges);
  launch_attend(a, n_ranges, n_rows);
  launch_combine(a, layer, n_rows, out, rounded);
}

void DeviceDecoder::launch_combine(const AttendArguments& a, size_t layer, size_t n_rows, float* out,
                                   const QuantisedRows& rounded) {
  const float* const sinks = weights_.vector(weights_.host().layer(layer).attn_sinks);
  device_->launch("combine_splits",
                  CombineArguments{a.parts, a.states, out, a.heads.n_heads, a.heads.value_dim, a.n_splits,
                                   sinks, rounded},
                  a.heads.n_heads, n_rows, 1, kThreads, sizeof(CombineShared));
}

void DeviceDecoder::attend_to_all(const Rows& rows, size_t layer, const SampledRows& sample,
                                  const uint32_t* listed, float* out) {
  for (size_t begin = 0; begin < sample.size(); begin += kAttendRows) {
    const size_t end = std::min(begin + kAttendRows, sample.size());
    AttendArguments a = attend_arguments(rows, layer);
    a.rows = listed + begin;
    attend_in_ranges(a, layer, rows.position + sample[end - 1] + 1, end - begin,
                     out + begin * attended_dim(config_.layers[layer]));
  }
}

// Rows of one layer, chunk after chunk; those of a dense tail read everything and are not scored.
void DeviceDecoder::attend_by_policy(const Rows& rows, size_t layer, PromptEnd end) {
  Sequence& sequence = rows.sequence;
  const AttentionPlan& plan = sequence.plan(layer);
  const AttentionHeads& heads = config_.layers[layer].heads;
  const size_t n_tail = end == PromptEnd::kLater ? 0 : std::min(plan.needs.n_dense_tail, rows.n);
  const Rows head = rows.part(0, rows.n - n_tail);
  const ChunkPlan chunks{head.position, head.n, plan.shape.longest_chunk()};
  std::vector<MemorySet> sets(heads.n_kv_heads);
  uint64_t n_pairs = 0;
  bring_past(head, layer);
  for (size_t i = 0; i < chunks.n_chunks(); ++i) {
    const PositionRange range = chunks.chunk(i);
    const Rows chunk = head.part(range.begin - head.position, range.size());
    Memory memory;
    if (range.begin > 0) {
      choose_memory(chunk, layer, Phase::kPrefill, sets);
      memory = stage_memory(chunk, layer, sets);
    }
    n_pairs += heads.n_kv_heads * causal_pairs(0, range.size(), 0);
    for (const MemorySet& set : sets) n_pairs += range.begin > 0 ? range.size() * set.n_rows() : 0;
    const bool is_end = i + 1 == chunks.n_chunks() && end == PromptEnd::kFinal;
    const bool has_sums = plan.needs.column_sums != ColumnSums::kNone && !is_end;
    attend_chunk(chunk, layer, memory, has_sums);
    if (has_sums) observe(chunk, layer, memory, sets);
  }
  if (n_tail > 0) {
    const Rows tail = rows.part(head.n, n_tail);
    attend_to_all(tail, layer, tail.attended(attended_dim(config_.layers[layer])));
    n_pairs += heads.n_kv_heads * causal_pairs(tail.position, n_tail, 0);
  }
  sequence.policy_of_call().end_layer();
  sequence.count_pairs(n_pairs, causal_pairs(rows.position, rows.n, 0));
}

// A generated token reads what the rule says.
void DeviceDecoder::attend_token(const Rows& token, size_t layer) {
  std::vector<MemorySet> sets(config_.layers[layer].heads.n_kv_heads);
  bring_past(token, layer);
  choose_memory(token, layer, Phase::kDecode, sets);
  attend_chunk(token, layer, stage_memory(token, layer, sets), false);
  token.sequence.policy_of_call().end_layer();
}

// A chunk attends to itself, to the positions of its memory and to the rows that stand for several.
void DeviceDecoder::attend_chunk(const Rows& chunk, size_t layer, const Memory& memory, bool has_sums) {
  const size_t dim = tile_dim_of(chunk, layer);
  if (dim > 0) {
    attend_chunk_by_tiles(chunk, layer, memory, has_sums, dim);
  } else {
    attend_chunk_by_rows(chunk, layer, memory, has_sums);
  }
  if (has_sums) add_columns(chunk, layer, memory, dim);
}

void DeviceDecoder::attend_chunk_by_tiles(const Rows& chunk, size_t layer, const Memory& memory,
                                          bool has_sums, size_t dim) {
  const AttentionPlan& plan = chunk.sequence.plan(layer);
  AttendTilesArguments a = tiles_arguments(chunk, layer, chunk.attended(attended_dim(config_.layers[layer])));
  const DeviceCache cache = a.lists[0].cache;
  a.lists[0].keys = keys_from(chunk.position);
  if (memory.most > 0) a.lists[a.n_lists++] = {cache, memory.keys, nullptr};
  if (memory.most_synthetic > 0)
    a.lists[a.n_lists++] = {memory.synthetic, memory.synthetic_keys, memory.biases};
  if (has_sums) a.states = chunk.state.joined_.as<float>();
  a.part_floats = u32(part_floats(plan, a.heads.n_heads));
  a.is_joint = plan.needs.column_sums == ColumnSums::kJoint;
  launch_tiles(a, dim);
}

// Own keys, memory and synthetic rows each in ranges of their own.
void DeviceDecoder::attend_chunk_by_rows(const Rows& chunk, size_t layer, const Memory& memory,
                                         bool has_sums) {
  const AttentionHeads& heads = config_.layers[layer].heads;
  const size_t dim = attended_dim(config_.layers[layer]);
  const PolicyNeeds& needs = chunk.sequence.plan(layer).needs;
  const bool is_joint = needs.column_sums == ColumnSums::kJoint;
  DeviceState& state = chunk.state;
  const float* const sinks = weights_.vector(weights_.host().layer(layer).attn_sinks);
  const KeyList own = keys_from(chunk.position);
  float* const joined = state.joined_.as<float>();
  float* const joined_memory = joined + part_floats(chunk.sequence.plan(layer), heads.n_heads);
  for (size_t begin = 0; begin < chunk.n; begin += kAttendRows) {
    const Rows some = chunk.part(begin, std::min(kAttendRows, chunk.n - begin));
    const size_t n_own = ranges_of(begin + some.n), n_memory = ranges_of(memory.most),
                 n_synthetic = ranges_of(memory.most_synthetic);
    AttendArguments a = attend_arguments(some, layer);
    a.n_splits = u32(n_own + n_memory + n_synthetic);
    const auto attend = [&](size_t first, size_t n_ranges) {
      a.first_split = u32(first);
      if (n_ranges > 0) launch_attend(a, n_ranges, some.n);
    };
    a.keys = own;
    attend(0, n_own);
    a.keys = memory.keys;
    attend(n_own, n_memory);
    a.keys = memory.synthetic_keys;
    a.cache = memory.synthetic;
    a.biases = memory.biases;
    attend(n_own + n_memory, n_synthetic);
    launch_combine(a, layer, some.n, some.attended(dim));
    // Sums of one part are shares of its own softmax, which has no sinks.
    const auto join = [&](float* out, size_t first, size_t n_ranges) {
      if (!has_sums || n_ranges == 0) return;
      const size_t n_states = some.n * heads.n_heads;
      device_->launch(
          "join_states",
          JoinArguments{a.states, out + begin * heads.n_heads * 2, u32(n_states), u32(first), u32(n_ranges),
                        a.n_splits, is_joint ? sinks : nullptr, u32(heads.n_heads)},
          ceil_div(n_states, kThreads), 1, 1, kThreads, 0);
    };
    join(joined, 0, is_joint ? a.n_splits : n_own);
    if (!is_joint) join(joined_memory, n_own, n_memory);
  }
}

// What keys of the chunk and of its memory receive from the chunk's queries, by the states of their softmax.
void DeviceDecoder::add_columns(const Rows& chunk, size_t layer, const Memory& memory, size_t dim) {
  const AttentionHeads& heads = config_.layers[layer].heads;
  const AttentionPlan& plan = chunk.sequence.plan(layer);
  const PolicyNeeds& needs = plan.needs;
  const bool is_joint = needs.column_sums == ColumnSums::kJoint;
  const AttendArguments a = attend_arguments(chunk, layer);
  DeviceState& state = chunk.state;
  for (const bool is_memory : {false, true}) {
    if (is_memory && memory.most == 0) continue;
    const size_t n_keys = is_memory ? memory.most : chunk.n;
    ColumnArguments c{};
    c.qkv = a.qkv, c.cache = a.cache, c.heads = a.heads, c.stride = a.stride, c.first = u32(chunk.position);
    c.scale = a.scale, c.soft_cap = a.soft_cap;
    c.states = state.joined_.as<float>() + (is_memory && !is_joint ? part_floats(plan, heads.n_heads) : 0);
    c.sums = state.sums_.as<float>() + (is_memory ? heads.n_kv_heads * chunk.n : 0);
    c.is_scored = memory.is_scored;
    c.keys = is_memory ? memory.keys : keys_from(chunk.position);
    c.n_rows = u32(chunk.n);
    c.sums_stride = u32(n_keys);
    c.part_stride = u32(heads.n_kv_heads * (chunk.n + memory.most));
    c.weight = row_weight(needs.query_weights);
    c.n_last = u32(needs.n_last_queries);
    if (dim > 0) {
      device_->launch(column_tiles_kernel(dim), c, ceil_div(n_keys, size_t{kAttendTile}), heads.n_kv_heads,
                      column_parts(chunk.n), kThreads, column_tiles_bytes(dim));
    } else {
      device_->launch("column_sums", c, ceil_div(n_keys, kThreads / kWarpSize), heads.n_kv_heads, 1, kThreads,
                      0);
    }
  }
}

}  // namespace edgeh2o::cuda
