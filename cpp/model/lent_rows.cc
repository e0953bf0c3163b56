#include "model/lent_rows.h"

#include <algorithm>

#include "base/check.h"
#include "ops/decode_attention.h"
#include "sparse/sparse_policy.h"

namespace edgeh2o {

LentRows::LentRows(const KernelTable& table, const DecoderConfig& config, const DecoderConfig& main,
                   size_t max_context)
    : max_context_(max_context) {
  PolicyNeeds needs;
  needs.reads_all = true;
  for (size_t i = 0; i < config.n_layers(); ++i) {
    const LayerSpec& layer = config.layers[i];
    EH2O_CHECK(layer.lender < main.n_layers() && main.layers[layer.lender].attends(), "layer ", i,
               " reads layer ", layer.lender, " of a model of ", main.n_layers(),
               " layers, which has no keys");
    const LayerSpec& lender = main.layers[layer.lender];
    EH2O_CHECK(lender.latent.is_none() && lender.heads.n_kv_heads == layer.heads.n_kv_heads &&
                   lender.heads.key_dim == layer.heads.key_dim &&
                   lender.heads.value_dim == layer.heads.value_dim && !lender.heads.values_are_keys &&
                   lender.window == layer.window,
               "layer ", i, " reads ", layer.heads.n_kv_heads, " KV heads of ", layer.heads.key_dim,
               " numbers in a window of ", layer.window, ", layer ", layer.lender, " of the model has ",
               lender.heads.n_kv_heads, " of ", lender.heads.key_dim, " in one of ", lender.window);
    AttentionShape shape;
    shape.heads = layer.heads;
    shape.max_context = max_context;
    shape.batch_size = shape.chunk_size = 1;
    plans_.emplace_back(table, shape, needs);
  }
}

size_t LentRows::scratch_bytes(size_t n_threads) const {
  size_t most = 0;
  for (const AttentionPlan& plan : plans_) most = std::max(most, plan.scratch_bytes(n_threads));
  return most;
}

void LentRows::attend(size_t layer, MatView<const float> q, const LayerKv& kv, size_t position, size_t window,
                      uint8_t* scratch, size_t n_threads, MatView<float> out) const {
  LayerKv rows = kv;
  rows.sinks = nullptr;  // those are of the other model's queries
  DecodeAttention attention(plans_[layer], scratch, n_threads);
  const size_t latest = position - 1;
  const MemorySet seen = MemorySet::all_seen(latest, window > 0 ? window - 1 : 0);
  for (size_t head = 0; head < plans_[layer].shape.heads.n_kv_heads; ++head) {
    attention.set_memory(0, head, seen, latest, rows);
  }
  attention.run(q, rows, out);
}

}  // namespace edgeh2o
