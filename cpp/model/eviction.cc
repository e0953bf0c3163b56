#include "model/eviction.h"

#include "base/check.h"
#include "ops/rows.h"

namespace edgeh2o {

namespace {

void check_keys(const DecoderConfig& config) {
  for (const LayerSpec& layer : config.layers) {
    EH2O_CHECK(!layer.qk_norm_after_rope || !layer.attends(),
               "this model normalises its keys after their rotation, so that they cannot be moved to other "
               "positions; use --context-full shift");
    EH2O_CHECK(!layer.is_chunked,
               "what queries of this model see begins at fixed positions, which tokens cannot be moved over; "
               "use --context-full shift");
  }
}

}  // namespace

void check_eviction(const DecoderConfig& config, const SparsePolicy& policy, const SequenceShape& shape) {
  check_keys(config);
  Sequence::check_eviction(config.keeps(), policy, shape);
}

void allow_eviction(const DecoderConfig& config, Sequence& sequence, bool is_allowed) {
  if (is_allowed) check_keys(config);
  sequence.allow_eviction(is_allowed);
}

void evict(const DecoderConfig& config, Sequence& sequence, size_t n_dropped) {
  struct Table {
    std::vector<float> cos, sin;  // [n_dropped + 1][n_pairs] of going back so many positions
  };
  std::vector<Table> tables;
  for (const RopeConfig& rope : config.ropes) {
    const std::vector<float>& inv_freq = rope.of_context(sequence.shape().max_context);
    const size_t n = (n_dropped + 1) * inv_freq.size();
    tables.push_back({std::vector<float>(n), std::vector<float>(n)});
    Table& table = tables.back();
    fill_rope_table(table.cos.data(), table.sin.data(), 0, n_dropped + 1, {inv_freq.data(), inv_freq.size()},
                    1.0f);
    for (float& sin : table.sin) sin = -sin;
  }
  std::vector<Rotation> rotations;
  for (size_t i = 0; i < config.n_layers(); ++i) {
    const LayerSpec& layer = config.layers[i];
    const Table& table = tables[layer.rope];
    const size_t first = layer.latent.is_none() ? 0 : layer.latent.rank;
    rotations.push_back(
        {table.cos.data(), table.sin.data(), first, config.rope(i).n_pairs(), layer.window > 0});
  }
  sequence.evict(n_dropped, rotations);
}

}  // namespace edgeh2o
