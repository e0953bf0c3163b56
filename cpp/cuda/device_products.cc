// Products with matrices on a GPU: those of layers, and the logits.
#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "cuda/device_decoder.h"
#include "cuda/launches.h"
#include "ops/rows.h"

namespace edgeh2o::cuda {

void DeviceDecoder::multiply(const Rows& rows, const Linear& linear, const float* input, float* out,
                             size_t stride, bool accumulates) {
  const Product product{&linear, out};
  multiply_all(rows, {&product, 1}, input, stride, accumulates);
}

void DeviceDecoder::multiply_all(const Rows& rows, Span<const Product> products, const float* input,
                                 size_t stride, bool accumulates) {
  MultiplyArguments pending{};
  size_t n_panels = 0;  // of the matrices that are to go together
  const auto launch = [&] {
    if (n_panels > 0) launch_multiply(pending, 1);
    n_panels = 0;
  };
  for (const Product& product : products) {
    const float* bias = weights_.vector(product.linear->bias);
    float* out = product.out;
    for (const DeviceMatrix& w : weights_.parts(product.linear->weight)) {
      const bool joins = n_panels > 0 && is_tiled(w.format) && w.format == pending.w.format &&
                         !takes_gemm(w, rows.n) && pending.n_further + 1 < kMostMatrices;
      if (joins) {
        pending.further[pending.n_further++] = {w, bias, out, u32(n_panels)};
      } else {
        launch();
        pending = {w,           input,       rows_of(rows.state.q8_, rows.state.d8_, w.depth),
                   bias,        out,         w.depth,
                   u32(stride), accumulates, u32(rows.n)};
      }
      n_panels += ceil_div(w.n_out, size_t{kPanelRows});
      out += w.n_out;
      if (bias) bias += w.n_out;
    }
  }
  launch();
}

void DeviceDecoder::launch_multiply(const MultiplyArguments& a, size_t n_heads) {
  const DeviceMatrix& w = a.w;
  if (takes_gemm(w, a.n_rows)) {
    const GemmKernel kernel = gemm_kernel(w.format, a.n_rows, w.n_out, device_->n_processors());
    device_->launch(kernel.name, a, ceil_div(w.n_out, size_t{kGemmTile}),
                    ceil_div(a.n_rows, kernel.block_rows), 1, kThreads, kernel.shared_bytes);
    return;
  }
  launch_row_products(*device_, a, n_heads);
}

void DeviceDecoder::launch_logits(DeviceState& state, const float* x, size_t n_rows) {
  const std::vector<DeviceMatrix>& parts = weights_.output();
  const size_t dim = config_.model_dim, vocab_size = config_.vocab_size;
  const bool is_quantised = is_tiled(parts[0].format);
  QuantisedRows q8 = rows_of(state.q8_, state.d8_, dim);
  if (!is_quantised) q8.q = nullptr;
  float *const norm = state.norm_.as<float>(), *const logits = state.logits_.as<float>();
  device_->launch(
      "norm_rows",
      NormArguments{x, weights_.vector(weights_.host().output_norm()), is_quantised ? nullptr : norm, q8,
                    u32(dim), 1, u32(dim), u32(dim), config_.norm_eps},
      n_rows, 1, 1, kNormThreads, kSmallShared);
  size_t first = 0;
  for (const DeviceMatrix& part : parts) {
    launch_row_products(*device_,
                        MultiplyArguments{part, norm, q8, nullptr, logits + first, part.depth,
                                          u32(vocab_size), false, u32(n_rows)},
                        1);
    first += part.n_out;
  }
  device_->download(state.staged_logits_.as<void>(), logits, n_rows * vocab_size * sizeof(float));
}

void DeviceDecoder::read_logits(DeviceState& state, size_t n_rows, float* out) {
  const size_t vocab_size = config_.vocab_size;
  device_->wait();
  std::memcpy(out, state.staged_logits_.as<float>(), n_rows * vocab_size * sizeof(float));
  scale_logits(table_, {out, n_rows, vocab_size, vocab_size}, config_.logit_scale, config_.logit_soft_cap);
}

void DeviceDecoder::row_logits(DeviceState& state, size_t first, size_t n_rows, float* out) {
  const std::lock_guard<std::mutex> lock(mutex_);
  EH2O_CHECK(state.shape_.all_rows, "logits of single rows need a session made with all_rows");
  for (size_t begin = 0; begin < n_rows; begin += kLogitRows) {
    const size_t n = std::min(kLogitRows, n_rows - begin);
    launch_logits(state, state.x_.as<float>() + (first + begin) * config_.model_dim, n);
    read_logits(state, n, out + begin * config_.vocab_size);
  }
}

}  // namespace edgeh2o::cuda
