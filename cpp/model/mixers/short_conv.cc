#include "model/mixers/short_conv.h"

#include <algorithm>

#include "model/branch.h"
#include "ops/convolution.h"
#include "ops/rows.h"

namespace edgeh2o {

void mix_short_conv(const LayerCall& call) {
  const LayerWeights& w = call.layer_weights();
  const KernelTable& table = call.table();
  Activations& a = call.buffers();
  RecurrentState& state = call.step.sequence->recurrent(call.layer);
  const size_t n = call.step.tokens.size, dim = call.config.model_dim, n_taps = call.spec().n_conv_taps;
  const size_t first = call.first_output_row();
  const PackedOut packed = packed_for(call, {&w.conv_out});
  const bool looks_ahead = call.looks_ahead();
  // Rows before the first output count as inputs of the convolution only.
  for (size_t begin = first - std::min(first, n_taps - 1); begin < n;) {
    const size_t count = std::min(a.rows_at_once, n - begin), n_skipped = std::max(first, begin) - begin;
    const MatView<float> x = call.x().rows_from(begin, count);
    const MatView<float> bcy{a.mixer_in, count, 3 * dim, 3 * dim};
    const MatmulOutput input = output_of(w.conv_in, bcy.data, bcy.stride);
    matmul(table, begin_branch(call, x, w.attn_norm, {&w.conv_in}), {&input, 1}, a.scratch);
    short_conv(table, bcy, w.conv.data(), n_taps, state.step(looks_ahead, begin),
               {a.attended, count, dim, dim});
    if (looks_ahead) state.note_inputs(begin, {bcy.data, count, dim, bcy.stride});
    if (n_skipped < count) {
      const size_t n_rows = count - n_skipped;
      const MatView<const float> mixed{a.attended + n_skipped * dim, n_rows, dim, dim};
      end_branch(call, x.rows_from(n_skipped, n_rows), pack_rows(table, mixed, packed), w.conv_out,
                 w.attn_post_norm);
    }
    begin += count;
  }
  looks_ahead ? state.look_ahead(n) : state.advance(n);
}

}  // namespace edgeh2o
