#include "model/streams.h"

#include <algorithm>

#include "model/branch.h"
#include "model/mixers/attention.h"
#include "model/token_inputs.h"
#include "ops/rows.h"
#include "ops/streams.h"

namespace edgeh2o {
namespace {

Span<const float> span_of(const std::vector<float>& values) { return {values.data(), values.size()}; }

// tanh(router(norm(rows)) / dim) of every token [n][kStreams], in the buffer `gate`.
MatView<const float> find_modes(const LayerCall& call, MatView<const float> rows) {
  const KernelTable& table = call.table();
  const LayerWeights& w = call.layer_weights();
  Activations& a = call.buffers();
  const size_t n = rows.rows, dim = rows.cols;
  const MatmulInput input =
      rms_norm_rows(table, rows, w.stream_router_norm.data(), call.config.norm_eps,
                    {{a.norm, n, dim, dim}, packed_for(call, {&w.stream_router})}, a.scratch);
  const MatView<float> modes{a.gate, n, kStreams, kStreams};
  const MatmulOutput output = output_of(w.stream_router, modes.data, kStreams);
  matmul(table, input, {&output, 1}, call.products());
  scale_logits(table, modes, 1.0f / static_cast<float>(dim), 1.0f);  // a cap of 1 is the tanh
  return as_const(modes);
}

Streams streams_of(const Weights& weights, const Activations& a, size_t first, size_t n) {
  return Streams{a.streams, 0, weights.streams_in()[0].rows()}.rows_from(first, n);
}

}  // namespace

void spread_streams(const Weights& weights, Activations& a, size_t first, size_t n,
                    const AdapterScales& adapters) {
  const KernelTable& table = weights.table();
  const std::vector<PackedMatrix>& in = weights.streams_in();
  for (size_t begin = 0; begin < n; begin += a.rows_at_once) {
    const Streams streams = streams_of(weights, a, first + begin, std::min(a.rows_at_once, n - begin));
    const size_t dim = streams.dim;
    const MatView<const float> x{a.x + (first + begin) * dim, streams.n, dim, dim};
    copy_rows(x, streams.stream(0));
    const PackedOut packed = packed_for(table, a.packed, {&in[0], &in[1], &in[2]}, adapters.any());
    const MatmulInput input = pack_rows(table, x, packed);
    MatmulOutput outputs[kStreams - 1];
    for (size_t k = 1; k < kStreams; ++k) {
      const MatView<float> rows = streams.stream(k);
      outputs[k - 1] = {&in[k - 1], nullptr, rows.data, rows.stride};
    }
    matmul(table, input, {outputs, kStreams - 1}, {a.scratch, adapters});
    for (size_t k = 1; k < kStreams; ++k) match_sizes(table, streams.stream(k), x);
  }
}

void predict(const LayerCall& call) {
  const MatView<float> x = call.x();
  const size_t rows_at_once = call.buffers().rows_at_once;
  for (size_t first = first_input_row(call); first < x.rows; first += rows_at_once) {
    const size_t n = std::min(rows_at_once, x.rows - first);
    const Streams streams = call.streams().rows_from(first, n);
    predict_streams(call.table(), streams, find_modes(call, as_const(streams.stream(0))),
                    span_of(call.layer_weights().stream_predictor), x.rows_from(first, n));
  }
}

void correct(const LayerCall& call, size_t first, MatView<float> x) {
  const KernelTable& table = call.table();
  const LayerWeights& w = call.layer_weights();
  Activations& a = call.buffers();
  const Streams streams = call.streams().rows_from(first, x.rows);
  correct_streams(table, streams, find_modes(call, as_const(x)), span_of(w.stream_corrector),
                  span_of(w.stream_scale), x);
  if (call.spec().token_input_dim == 0) return;
  const MatView<float> out{a.norm, x.rows, x.cols, x.cols};
  const MatmulInput gated = gated_token_input(call, first, x);
  const MatmulOutput output = output_of(w.token_input_out, out.data, out.stride);
  matmul(table, gated, {&output, 1}, call.products());
  rms_norm_groups(table, out, span_of(w.token_input_post_norm), call.config.norm_eps);
  for (size_t k = 1; k < kStreams; ++k) add_rows(table, streams.stream(k), out, nullptr, 0.0f, 1.0f);
}

void merge_streams(const Weights& weights, Activations& a, size_t first, size_t n,
                   const AdapterScales& adapters) {
  const KernelTable& table = weights.table();
  const Streams streams = streams_of(weights, a, first, n);
  const size_t dim = streams.dim;
  const MatView<float> x{a.x + first * dim, n, dim, dim}, out{a.norm, n, dim, dim};
  const MatView<const float> first_stream = as_const(streams.stream(0));
  copy_rows(first_stream, x);
  for (size_t k = 1; k < kStreams; ++k) {
    const PackedMatrix& matrix = weights.streams_out()[k - 1];
    const MatmulOutput output{&matrix, nullptr, out.data, out.stride};
    const PackedOut packed = packed_for(table, a.packed, {&matrix}, adapters.any());
    matmul(table, pack_rows(table, as_const(streams.stream(k)), packed), {&output, 1}, {a.scratch, adapters});
    match_sizes(table, out, first_stream);
    add_rows(table, x, out, nullptr, 0.0f, 1.0f);
  }
  scale_logits(table, x, 1.0f / static_cast<float>(kStreams), 0.0f);
}

}  // namespace edgeh2o
