#include "model/key_balance.h"

#include <algorithm>
#include <cmath>

namespace edgeh2o {
namespace {

// Columns of the weights that are looked at. On Qwen2.5-Coder-0.5B 256 of 896 give the same powers of two as
// all of them in all but 2 % of the dimensions, and the step of quantised rows.
constexpr size_t kColumns = PackedMatrix::kRangeStep;
constexpr double kMaxExponent = 8;
// Keys are not made larger than this in the root of their mean square: f16 ends at 65,504.
constexpr double kLargestKey = 1024;

// Mean squares of outputs [first, first + n) of a projection whose inputs are `norm`, or 1, times independent
// numbers of variance 1.
std::vector<double> mean_squares(const PackedMatrix& weight, size_t first, size_t n, const float* bias,
                                 const std::vector<float>& norm) {
  const size_t n_cols = std::min(weight.cols(), kColumns);
  const double share = static_cast<double>(weight.cols()) / static_cast<double>(n_cols);
  std::vector<float> row(n_cols);
  std::vector<double> squares(n);
  for (size_t i = 0; i < n; ++i) {
    weight.dequantize_range(row.data(), first + i, 0, n_cols);
    double sum = 0;
    for (size_t col = 0; col < n_cols; ++col) {
      const double x = static_cast<double>(row[col]) * (norm.empty() ? 1.0 : static_cast<double>(norm[col]));
      sum += x * x;
    }
    const double b = bias ? static_cast<double>(bias[first + i]) : 0.0;
    squares[i] = share * sum + b * b;
  }
  return squares;
}

// Of every head: both dimensions of a rotary pair get their mean.
void join_rotary_pairs(std::vector<double>& squares, size_t head_dim, size_t n_pairs) {
  for (size_t head = 0; head < squares.size(); head += head_dim) {
    for (size_t i = 0; i < n_pairs; ++i) {
      double &a = squares[head + i], &b = squares[head + n_pairs + i];
      a = b = (a + b) / 2;
    }
  }
}

// log2 sqrt(|q| / |k|), of squares; 0 where either is 0 or no number.
double balance_exponent(double q, double k) {
  const double exponent = std::log2(q / k) / 4;
  return std::isfinite(exponent) ? exponent : 0.0;
}

// The powers of two next to these, times one by which none makes keys smaller: numbers that f16 still holds
// stay so. q, k: squares.
void balance_head(const double* q, const double* k, size_t n, float* factors) {
  double least = balance_exponent(q[0], k[0]);
  for (size_t i = 1; i < n; ++i) least = std::min(least, balance_exponent(q[i], k[i]));
  for (size_t i = 0; i < n; ++i) {
    const double room = std::floor(std::log2(kLargestKey / std::max(1.0, std::sqrt(k[i]))));
    const double exponent = std::min({std::round(balance_exponent(q[i], k[i]) - least), room, kMaxExponent});
    factors[i] = std::ldexp(1.0f, std::max(0, static_cast<int>(exponent)));
  }
}

bool has_plain_keys(const DecoderConfig& config) {
  return std::all_of(config.layers.begin(), config.layers.end(), [](const LayerSpec& spec) {
    return !spec.attends() ||
           (spec.heads.has_own_kv() && spec.latent.is_none() && spec.qk_norm == QkNorm::kNone);
  });
}

}  // namespace

std::vector<float> balance_keys(const DecoderConfig& config, size_t layer, const LayerWeights& weights) {
  const LayerSpec& spec = config.layers[layer];
  const AttentionHeads& heads = spec.heads;
  const float *q_bias = weights.attn_q.bias.data(), *k_bias = weights.attn_k.bias.data();
  const size_t q_dim = heads.q_dim(), k_dim = heads.k_dim(), gate_dim = spec.gate_dim();
  if (!weights.attn_qkv_bias.empty()) {
    q_bias = weights.attn_qkv_bias.data();
    k_bias = q_bias + gate_dim + q_dim;
  }
  if (!spec.attends() || !k_bias || !has_plain_keys(config)) return {};

  std::vector<double> q = mean_squares(weights.attn_q.weight, gate_dim, q_dim, q_bias, weights.attn_norm);
  std::vector<double> k = mean_squares(weights.attn_k.weight, 0, k_dim, k_bias, weights.attn_norm);
  const size_t dim = heads.key_dim, group = heads.n_heads / heads.n_kv_heads;
  const size_t n_pairs = config.rope(layer).n_pairs();
  join_rotary_pairs(q, dim, n_pairs);
  join_rotary_pairs(k, dim, n_pairs);
  std::vector<float> factors(q_dim + k_dim);
  std::vector<double> group_q(dim);
  for (size_t kv_head = 0; kv_head < heads.n_kv_heads; ++kv_head) {
    const size_t first = kv_head * group * dim;
    std::fill(group_q.begin(), group_q.end(), 0.0);
    for (size_t i = 0; i < group * dim; ++i) group_q[i % dim] += q[first + i] / static_cast<double>(group);
    float* of_keys = factors.data() + q_dim + kv_head * dim;
    balance_head(group_q.data(), k.data() + kv_head * dim, dim, of_keys);
    for (size_t i = 0; i < group * dim; ++i) factors[first + i] = 1.0f / of_keys[i % dim];
  }
  const bool changes = std::any_of(factors.begin(), factors.end(), [](float s) { return s != 1.0f; });
  return changes ? factors : std::vector<float>{};
}

}  // namespace edgeh2o
