// Both ends of multi-head latent attention (DeepSeek-V2, 2024, section 2.1): see LatentHeads. With the
// weights W_k and W_v of a head, a latent row c and the rotated part r of its keys, a logit is q . [W_k c; r]
// = [W_k^T q_nope; q_rope] . [c; r], and the sum of weighted values W_v c is W_v times the sum of weighted c.
#pragma once

#include "model/mixers/indexer.h"

namespace edgeh2o {

// Queries [n][n_heads * row_dim], in the latent space, and the rows to cache [n][row_dim], of the rows x of a
// call, of which the first is row first_row of its buffers: normed and rotated. And those of the layer's own
// indexer, if it has one.
void project_latent(const LayerCall& call, MatView<float> x, size_t first_row, MatView<float> q,
                    MatView<float> row, const IndexRows& index);

// Values [n][n_heads * value_dim] of what attention gives, [n][n_heads * row_dim], n <= rows_at_once; they
// are overwritten by the next call.
MatView<const float> latent_values(const LayerCall& call, MatView<const float> attended);

}  // namespace edgeh2o
