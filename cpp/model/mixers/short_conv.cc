#include "model/mixers/short_conv.h"

#include <algorithm>

#include "model/branch.h"
#include "model/mixers/recurrent.h"
#include "ops/convolution.h"
#include "ops/rows.h"

namespace edgeh2o {
namespace {

struct ShortConv {
  struct Parts {
    MatView<float> bcy;
    Parts(const LayerCall& call, size_t n) {
      const size_t dim = 3 * call.config.model_dim;
      bcy = {call.buffers().mixer_in, n, dim, dim};
    }
    Parts rows_from(size_t first, size_t n) const {
      Parts rows = *this;
      rows.bcy = bcy.rows_from(first, n);
      return rows;
    }
  };

  static size_t width(const LayerCall& call) { return call.config.model_dim; }

  static void project(const LayerCall& call, MatView<float> x, const Parts& parts) {
    const LayerWeights& w = call.layer_weights();
    const MatmulOutput input = output_of(w.conv_in, parts.bcy.data, parts.bcy.stride);
    matmul(call.table(), begin_branch(call, x, w.attn_norm, {&w.conv_in}), {&input, 1}, call.products());
  }

  static void recur(const LayerCall& call, size_t begin, const Parts& parts, MatView<float> out) {
    RecurrentState& state = call.step.sequence->recurrent(call.layer);
    const bool looks_ahead = call.looks_ahead();
    short_conv(call.table(), parts.bcy, call.layer_weights().conv.data(), call.spec().n_conv_taps,
               state.step(looks_ahead, begin), out);
    if (looks_ahead) state.note_inputs(begin, {parts.bcy.data, out.rows, out.cols, parts.bcy.stride});
  }

  static void finish(const LayerCall& call, MatView<float> x, const Parts&, MatView<float> out) {
    const LayerWeights& w = call.layer_weights();
    const MatmulInput mixed = pack_rows(call.table(), as_const(out), packed_for(call, {&w.conv_out}));
    end_branch(call, x, mixed, w.conv_out, w.attn_post_norm);
  }
};

}  // namespace

void mix_short_conv(const LayerCall& call) {
  // Rows before the first output count as inputs of the convolution only.
  const size_t first = call.first_output_row();
  mix_step<ShortConv>(call, first - std::min(first, call.spec().n_conv_taps - 1));
}

void mix_short_convs(const LayerCall& call, Span<const Step> steps, MatView<float> x) {
  mix_steps<ShortConv>(call, steps, x);
}

}  // namespace edgeh2o
