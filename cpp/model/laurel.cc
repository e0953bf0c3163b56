#include "model/laurel.h"

#include <cmath>

#include "model/branch.h"
#include "ops/rows.h"

namespace edgeh2o {

void add_laurel(const LayerCall& call, MatView<float> x) {
  const KernelTable& table = call.table();
  const LayerWeights& w = call.layer_weights();
  Activations& a = call.buffers();
  const size_t n = x.rows, rank = call.spec().laurel_rank;
  const MatView<float> normed{a.norm, n, x.cols, x.cols}, inner{a.gate, n, rank, rank};
  const MatmulInput input = rms_norm_rows(table, as_const(x), w.attn_norm.data(), call.config.norm_eps,
                                          {normed, packed_for(call, {&w.laurel_in})}, a.scratch);
  const MatmulOutput output = output_of(w.laurel_in, inner.data, rank);
  matmul(table, input, {&output, 1}, call.products());
  add_rows(table, x, normed, nullptr, 0.0f, 1.0f);
  end_branch(call, x, pack_rows(table, as_const(inner), packed_for(call, {&w.laurel_out})), w.laurel_out,
             w.laurel_post_norm);
}

void scale_branches(const LayerCall& call, MatView<float> x) {
  scale_logits(call.table(), x, std::sqrt(0.5f), 0.0f);
}

}  // namespace edgeh2o
