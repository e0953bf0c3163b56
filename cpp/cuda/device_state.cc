#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "cuda/device_decoder.h"
#include "cuda/launches.h"

namespace edgeh2o::cuda {
namespace {

size_t splits_of(size_t max_context) { return ceil_div(max_context, static_cast<size_t>(kSplitKeys)); }

// The widest row of 8 bits that products of latent attention take: parts of all heads are padded one by one.
size_t latent_input_dim(const LayerSpec& layer) {
  const LatentHeads& latent = layer.latent;
  if (latent.is_none()) return 0;
  const size_t n_heads = layer.heads.n_heads, of_head = std::max(latent.nope_dim, latent.rank);
  return std::max({latent.q_rank, n_heads * round_up(of_head, kTileDepth), n_heads * latent.value_dim});
}

// Bytes of the buffers, in the order of the constructor.
struct Sizes {
  Sizes(const DecoderConfig& config, const SequenceShape& shape, const PolicyNeeds& needs) {
    const auto widest = [&](const auto& f) { return config.widest(f); };
    const size_t dim = config.model_dim;
    const size_t out_dim = widest([](const LayerSpec& layer) { return attended_dim(layer); });
    const size_t mixer_out_dim = widest([dim](const LayerSpec& layer) { return layer.mixer_out_dim(dim); });
    const size_t latent_dim = widest([](const LayerSpec& layer) { return latent_input_dim(layer); });
    const size_t n_heads = widest([](const LayerSpec& layer) { return layer.heads.n_heads; });
    const size_t ffn_dim = widest([](const LayerSpec& layer) {
      return std::max({layer.ffn_dim, layer.shared_ffn_dim, layer.token_input_dim});
    });
    const size_t deepest = round_up(std::max({dim, mixer_out_dim, ffn_dim, latent_dim}), kTileDepth);
    const size_t row = kRowsAtOnce * sizeof(float), n_splits = splits_of(shape.max_context);
    const size_t all_rows = shape.batch_size * sizeof(float);
    x = all_rows * config.model_dim;
    norm = row * config.model_dim;
    qkv = all_rows * widest([](const LayerSpec& layer) { return layer.qkv_dim(); });
    attended = all_rows * mixer_out_dim;
    const auto is_recurrent = [](const LayerSpec& layer) { return layer.mixer != MixerKind::kAttention; };
    mixed =
        row * widest([&](const LayerSpec& l) { return is_recurrent(l) ? l.mixed_dim(dim) : l.inner_dim(); });
    convolved = row * widest([&](const LayerSpec& l) {
                  return is_recurrent(l) ? std::max(l.delta.conv_dim(), l.ssd.conv_dim()) : 0;
                });
    gate = row * ffn_dim;
    q8 = kRowsAtOnce * deepest;
    d8 = q8 / 32 * sizeof(float);
    parts = kAttendRows * sizeof(float) * n_splits * out_dim;
    states = kAttendRows * sizeof(float) * n_splits * n_heads * 2;
    inputs = (1 + shape.batch_size) * sizeof(int32_t);
    logits = kLogitRows * sizeof(float) * config.vocab_size;
    if (!needs.reads_all) {
      const size_t n_kv_heads = widest([](const LayerSpec& layer) { return layer.heads.n_kv_heads; });
      const size_t row_floats = widest([](const LayerSpec& layer) {
        return layer.heads.n_kv_heads * (layer.heads.key_dim + layer.heads.value_dim + 1);
      });
      memory = n_kv_heads * (shape.max_context + 3 + 3 * needs.max_synthetic) * sizeof(int32_t);
      synthetic = needs.max_synthetic * row_floats * sizeof(float);
      // Own keys, memory and synthetic rows have ranges of their own.
      const size_t n_more = 2 + splits_of(needs.max_synthetic);
      parts += kAttendRows * sizeof(float) * n_more * out_dim;
      states += kAttendRows * sizeof(float) * n_more * n_heads * 2;
      const size_t chunk = std::min({shape.chunk_size, shape.batch_size, shape.max_context});
      sampled = shape.guard.n_rows * (out_dim + 1) * sizeof(float);  // and their numbers
      if (needs.looks_at_queries) queries = qkv / shape.batch_size * chunk;
      take_scores(config, shape, needs, chunk, n_kv_heads, n_heads);
    }
    const size_t n_experts = widest([](const LayerSpec& layer) { return layer.n_experts; });
    // A shared expert is one more of every row, its gate one more logit.
    const size_t n_used =
        widest([](const LayerSpec& layer) { return layer.n_experts_used + (layer.shared_ffn_dim > 0); });
    router = n_experts > 0 ? row * (n_experts + 1) : 0;
    expert_input = n_experts > 0 ? norm : 0;
    expert_outputs = norm * n_used;
    routes = row * 3 * n_used;
    for (const RopeConfig& rope : config.ropes) {
      ropes.push_back(shape.batch_size * rope.n_pairs() * 2 * sizeof(float));
    }
    if (temperature_of(config).period > 0) query_factors = all_rows;
    for (const size_t size : ropes) staged += size;
    staged += inputs + query_factors;
  }

  size_t x, norm, qkv, attended, gate, q8, d8, parts, states, inputs, logits;
  size_t mixed, convolved;
  size_t memory = 0, synthetic = 0, joined = 0, sums = 0, bounds = 0, signs = 0, queries = 0, sampled = 0;
  size_t router, expert_input, expert_outputs, routes;
  size_t query_factors = 0, staged = 0;
  std::vector<size_t> ropes;

  size_t device_total() const {
    size_t total = mixed + convolved + x + norm + qkv + attended + 2 * gate + q8 + d8 + parts + states +
                   inputs + logits + memory + synthetic + joined + sums + bounds + signs + router +
                   expert_input + expert_outputs + routes + query_factors + sampled;
    for (const size_t size : ropes) total += size;
    return total;
  }
  size_t pinned_total() const {
    return staged + logits + memory + sums + synthetic + queries + router + routes + 2 * sampled;
  }

 private:
  void take_scores(const DecoderConfig& config, const SequenceShape& shape, const PolicyNeeds& needs,
                   size_t chunk, size_t n_kv_heads, size_t n_heads) {
    if (needs.column_sums != ColumnSums::kNone) {
      // Only scored slots are added up, but the rows of a layer are as wide as its largest memory.
      sums = column_parts(chunk) * n_kv_heads * (chunk + shape.max_context) * sizeof(float);
    }
    if (needs.max_scored_pages > 0) {
      const size_t key_dim = config.widest([](const LayerSpec& layer) { return layer.heads.key_dim; });
      const size_t group = config.widest([](const LayerSpec& layer) { return layer.heads.group_size(); });
      bounds = needs.max_scored_pages * 2 * key_dim * sizeof(float) + sizeof(uint32_t);
      signs = chunk * group * 2 * key_dim * sizeof(float);
      sums = std::max(sums, needs.max_scored_pages * sizeof(float));
    }
    if (sums > 0) joined = 2 * chunk * n_heads * 2 * sizeof(float);
  }
};

static_assert(kCacheBlock == kKvBlock && kCacheBlockBytes == kKvBlockBytes);

struct CacheBytes {
  size_t k = 0, v = 0;
};

CacheBytes layer_bytes(const LayerSpec& layer, const SequenceShape& shape) {
  const AttentionHeads& heads = layer.heads;
  if (heads.is_none() || !heads.has_own_kv()) return {};
  const size_t n_rows = shape.max_context * heads.n_kv_heads;
  return {n_rows * kv_row_bytes(shape.cache_types.k, heads.key_dim),
          heads.values_are_keys ? 0 : n_rows * kv_row_bytes(shape.cache_types.v, heads.value_dim)};
}

}  // namespace

DeviceState::DeviceState(Device& device, const DecoderConfig& config, const SequenceShape& shape,
                         const PolicyNeeds& needs)
    : device_(device), config_(config), shape_(shape) {
  for (const LayerSpec& layer : config.layers) {
    const CacheBytes n_bytes = layer_bytes(layer, shape);
    caches_.push_back({DeviceBuffer(device, n_bytes.k), DeviceBuffer(device, n_bytes.v)});
    recurrent_.emplace_back(device, layer.recurrence(config.model_dim).n_values() * sizeof(float));
  }
  n_replaced_.assign(config.n_layers(), SIZE_MAX);
  const Sizes sizes(config, shape, needs);
  x_ = DeviceBuffer(device, sizes.x);
  norm_ = DeviceBuffer(device, sizes.norm);
  qkv_ = DeviceBuffer(device, sizes.qkv);
  attended_ = DeviceBuffer(device, sizes.attended);
  mixed_ = DeviceBuffer(device, sizes.mixed);
  convolved_ = DeviceBuffer(device, sizes.convolved);
  gate_ = DeviceBuffer(device, sizes.gate);
  up_ = DeviceBuffer(device, sizes.gate);
  q8_ = DeviceBuffer(device, sizes.q8);
  d8_ = DeviceBuffer(device, sizes.d8);
  parts_ = DeviceBuffer(device, sizes.parts);
  states_ = DeviceBuffer(device, sizes.states);
  inputs_ = DeviceBuffer(device, sizes.inputs);
  logits_ = DeviceBuffer(device, sizes.logits);
  memory_ = DeviceBuffer(device, sizes.memory);
  joined_ = DeviceBuffer(device, sizes.joined);
  sums_ = DeviceBuffer(device, sizes.sums);
  synthetic_ = DeviceBuffer(device, sizes.synthetic);
  bounds_ = DeviceBuffer(device, sizes.bounds);
  signs_ = DeviceBuffer(device, sizes.signs);
  staged_memory_ = DeviceBuffer(device, sizes.memory, true);
  staged_sums_ = DeviceBuffer(device, sizes.sums, true);
  staged_synthetic_ = DeviceBuffer(device, sizes.synthetic, true);
  sampled_ = DeviceBuffer(device, sizes.sampled);
  staged_sampled_ = DeviceBuffer(device, 2 * sizes.sampled, true);
  expert_input_ = DeviceBuffer(device, sizes.expert_input);
  router_ = DeviceBuffer(device, sizes.router);
  expert_outputs_ = DeviceBuffer(device, sizes.expert_outputs);
  routes_ = DeviceBuffer(device, sizes.routes);
  staged_router_ = DeviceBuffer(device, sizes.router, true);
  staged_routes_ = DeviceBuffer(device, sizes.routes, true);
  staged_queries_ = DeviceBuffer(device, sizes.queries, true);
  n_on_host_.assign(config.n_layers(), 0);
  for (const size_t size : sizes.ropes) ropes_.emplace_back(device, size);
  query_factors_ = DeviceBuffer(device, sizes.query_factors);
  staged_ = DeviceBuffer(device, sizes.staged, true);
  staged_logits_ = DeviceBuffer(device, sizes.logits, true);
}

size_t DeviceState::cache_bytes(const DecoderConfig& config, const SequenceShape& shape) {
  size_t total = 0;
  for (const LayerSpec& layer : config.layers) {
    const CacheBytes n_bytes = layer_bytes(layer, shape);
    total += n_bytes.k + n_bytes.v;
  }
  return total;
}

size_t DeviceState::recurrent_bytes(const DecoderConfig& config) {
  size_t total = 0;
  for (const LayerSpec& layer : config.layers) total += layer.recurrence(config.model_dim).n_values();
  return total * sizeof(float);
}

DeviceState::BufferBytes DeviceState::buffer_bytes(const DecoderConfig& config, const SequenceShape& shape,
                                                   const PolicyNeeds& needs) {
  const Sizes sizes(config, shape, needs);
  return {sizes.device_total(), sizes.pinned_total()};
}

DeviceCache DeviceState::cache(size_t layer) const {
  const Cache& cache = caches_[source(layer)];
  const auto of = [](CacheType type) {
    if (type == CacheType::kQ8_0) return DeviceCacheType::kQ8;
    return type == CacheType::kF32 ? DeviceCacheType::kF32 : DeviceCacheType::kF16;
  };
  const bool values_are_keys = config_.layers[layer].heads.values_are_keys;
  return {cache.k.as<void>(), values_are_keys ? cache.k.as<void>() : cache.v.as<void>(),
          u32(shape_.max_context), of(shape_.cache_types.k), of(shape_.cache_types.v)};
}

// f(rows [begin, end) of a KV head of the host, where they lie on the device), keys and values, of one layer.
template <typename F>
void DeviceState::for_each_row_range(Sequence& sequence, size_t layer, PositionRange range, const F& f) {
  const AttentionState& state = sequence.layer(layer);
  const DeviceCache on_device = cache(layer);
  if (range.size() == 0) return;
  for (size_t head = 0; head < state.n_kv_heads(); ++head) {
    for (const bool is_key : {true, false}) {
      if (!is_key && state.values_are_keys()) continue;
      const KvRows rows = is_key ? state.rows().k(head) : state.rows().v(head);
      const size_t row_bytes = kv_row_bytes(rows.type, rows.head_dim);
      auto* const base = static_cast<uint8_t*>(is_key ? on_device.k : on_device.v);
      f(rows.row(range.begin), base + (head * shape_.max_context + range.begin) * row_bytes,
        range.size() * row_bytes);
    }
  }
}

void DeviceState::begin_call(Sequence& sequence) {
  for (size_t& n : n_on_host_) n = std::min(n, sequence.position());
  bool uploads = false;
  for (size_t i = 0; i < config_.n_layers(); ++i) {
    if (!sequence.has_recurrent(i) || n_replaced_[i] == sequence.recurrent(i).n_replaced()) continue;
    RecurrentState& state = sequence.recurrent(i);
    device_.upload(recurrent(i), state.values(), state.n_values() * sizeof(float));
    n_replaced_[i] = state.n_replaced();
    uploads = true;
  }
  if (uploads) device_.wait();  // the host may replace them again
}

void DeviceState::download_states(Sequence& sequence) {
  if (!moved_states_) return;
  for (size_t i = 0; i < config_.n_layers(); ++i) {
    // One that was replaced since is on the host alone.
    if (!sequence.has_recurrent(i) || n_replaced_[i] != sequence.recurrent(i).n_replaced()) continue;
    RecurrentState& state = sequence.recurrent(i);
    device_.download(state.values(), recurrent(i), state.n_values() * sizeof(float));
  }
  device_.wait();
  moved_states_ = false;
}

void DeviceState::copy_rows_to_host(Sequence& sequence, size_t layer, size_t end) {
  size_t& n_on_host = n_on_host_[source(layer)];
  if (n_on_host >= end) return;
  for_each_row_range(
      sequence, layer, {n_on_host, end},
      [&](uint8_t* host, uint8_t* on_device, size_t n_bytes) { device_.download(host, on_device, n_bytes); });
  device_.wait();
  n_on_host = end;
}

void DeviceState::download_rows(Sequence& sequence) {
  for (size_t i = 0; i < config_.n_layers(); ++i) {
    if (!sequence.has_own_rows(i)) continue;
    n_on_host_[i] = 0;  // a rewind may have left rows of another text
    copy_rows_to_host(sequence, i, sequence.layer(i).n_tokens());
  }
}

void DeviceState::upload_rows(Sequence& sequence) {
  for (size_t i = 0; i < config_.n_layers(); ++i) {
    if (!sequence.has_own_rows(i)) continue;
    n_on_host_[i] = sequence.layer(i).n_tokens();
    for_each_row_range(sequence, i, {0, n_on_host_[i]},
                       [&](const uint8_t* host, uint8_t* on_device, size_t n_bytes) {
                         device_.upload(on_device, host, n_bytes);
                       });
  }
  device_.wait();
}

}  // namespace edgeh2o::cuda
