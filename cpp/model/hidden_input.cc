#include "model/hidden_input.h"

#include <algorithm>

#include "model/branch.h"
#include "ops/matmul.h"
#include "ops/rows.h"

namespace edgeh2o {

void join_hidden(const DecoderConfig& config, const Weights& weights, Activations& a, size_t first_row,
                 MatView<const float> hidden) {
  const KernelTable& table = weights.table();
  const Linear& proj = weights.hidden_proj();
  const size_t dim = config.model_dim, width = 2 * dim;
  for (size_t first = 0; first < hidden.rows; first += a.rows_at_once) {
    const size_t n = std::min(a.rows_at_once, hidden.rows - first);
    const MatView<float> x{a.x + (first_row + first) * dim, n, dim, dim};
    const MatView<float> joined{a.inner, n, width, width};
    const MatView<float> embedded{a.inner, n, dim, width}, before{a.inner + dim, n, dim, width};
    norm_rows(table, as_const(x), row_norm(config, weights.embedding_norm(), {}), {embedded, {}}, a.scratch);
    norm_rows(table, hidden.rows_from(first, n), row_norm(config, weights.hidden_norm(), {}), {before, {}},
              a.scratch);
    const MatmulInput input =
        pack_rows(table, as_const(joined), packed_for(table, a.packed, {&proj.weight}, false));
    const MatmulOutput output = output_of(proj, x.data, dim);
    matmul(table, input, {&output, 1}, {a.scratch, {}});
  }
}

void join_plain(const DecoderConfig& config, const Weights& weights, Activations& a, int32_t token,
                const float* hidden) {
  const KernelTable& table = weights.table();
  const size_t dim = config.model_dim, width = config.hidden_width();
  embed_rows(table, weights.token_embd(), {&token, 1}, config.embedding_scale, {a.inner, 1, width, width});
  std::copy_n(hidden, width, a.inner + width);
  const Linear& proj = weights.hidden_proj();
  const MatmulInput input = pack_rows(table, {a.inner, 1, 2 * width, 2 * width},
                                      packed_for(table, a.packed, {&proj.weight}, false));
  const MatmulOutput output = output_of(proj, a.x, dim);
  matmul(table, input, {&output, 1}, {a.scratch, {}});
}

MatmulInput join_apart(const LayerCall& call, Span<const int32_t> tokens, MatView<float> x,
                       std::initializer_list<const Linear*> layers) {
  const KernelTable& table = call.table();
  const DecoderConfig& config = call.config;
  Activations& a = call.buffers();
  const size_t dim = config.model_dim, width = 2 * dim, n = x.rows;
  const MatView<float> embedded{a.norm, n, dim, dim}, joined{a.inner, n, width, width};
  const MatView<float> before{a.inner + dim, n, dim, width};
  embed_rows(table, call.weights.token_embd(), tokens, config.embedding_scale, embedded);
  norm_rows(table, as_const(embedded), row_norm(config, call.weights.embedding_norm(), {}),
            {{a.inner, n, dim, width}, {}}, a.scratch);
  norm_rows(table, as_const(x), row_norm(config, call.weights.hidden_norm(), {}), {before, {}}, a.scratch);
  if (config.residual_is_normed) copy_rows(as_const(before), x);
  return pack_rows(table, as_const(joined), packed_for(call, layers));
}

}  // namespace edgeh2o
