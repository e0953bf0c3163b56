#include "model/key_balance.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

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

// Of outputs that are normed, in groups of n, by weights of one group or of all: their mean squares then.
void norm_squares(std::vector<double>& squares, size_t n, const std::vector<float>& norm) {
  for (size_t group = 0; group < squares.size(); group += n) {
    double sum = 0;
    for (size_t i = 0; i < n; ++i) sum += squares[group + i];
    for (size_t i = 0; i < n; ++i) {
      const auto weight = static_cast<double>(norm[(group + i) % norm.size()]);
      squares[group + i] *= weight * weight * static_cast<double>(n) / sum;
    }
  }
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

// The mean of rows of n numbers.
std::vector<double> mean_row(const double* rows, size_t n_rows, size_t n) {
  std::vector<double> mean(n);
  for (size_t i = 0; i < n_rows * n; ++i) mean[i % n] += rows[i] / static_cast<double>(n_rows);
  return mean;
}

// The powers of two next to sqrt(|q| / |k|), times one by which none makes keys smaller: numbers that f16
// still holds stay so. Where either is 0, and where it is too small for the range, 1. q, k: squares.
void balance_head(const double* q, const double* k, size_t n, float* factors) {
  std::vector<double> exponents(n);
  double least = HUGE_VAL, largest = -HUGE_VAL;
  for (size_t i = 0; i < n; ++i) {
    exponents[i] = std::log2(q[i] / k[i]) / 4;
    if (!std::isfinite(exponents[i])) continue;
    least = std::min(least, exponents[i]);
    largest = std::max(largest, exponents[i]);
  }
  least = std::max(least, largest - kMaxExponent);
  for (size_t i = 0; i < n; ++i) {
    factors[i] = 1.0f;
    if (!std::isfinite(exponents[i])) continue;
    const double room = std::floor(std::log2(kLargestKey / std::max(1.0, std::sqrt(k[i]))));
    const double exponent = std::min({std::round(exponents[i] - least), room, kMaxExponent});
    factors[i] = std::ldexp(1.0f, std::max(0, static_cast<int>(exponent)));
  }
}

// Factors of queries, then of keys, of the heads whose squares these are.
std::vector<float> balance_heads(const std::vector<double>& q, const std::vector<double>& k, size_t dim) {
  std::vector<float> factors(q.size() + k.size());
  const size_t group = q.size() / k.size();
  for (size_t first = 0; first < k.size(); first += dim) {
    float* of_keys = factors.data() + q.size() + first;
    balance_head(mean_row(q.data() + first * group, group, dim).data(), k.data() + first, dim, of_keys);
    for (size_t i = 0; i < group * dim; ++i) factors[first * group + i] = 1.0f / of_keys[i % dim];
  }
  return factors;
}

bool has_plain_keys(const DecoderConfig& config) {
  return std::all_of(config.layers.begin(), config.layers.end(), [](const LayerSpec& spec) {
    return !spec.attends() || (spec.heads.has_own_kv() && spec.latent.is_none());
  });
}

}  // namespace

void balance_keys(const DecoderConfig& config, size_t layer, LayerWeights& weights) {
  const LayerSpec& spec = config.layers[layer];
  const AttentionHeads& heads = spec.heads;
  const float *q_bias = weights.attn_q.bias.data(), *k_bias = weights.attn_k.bias.data();
  const size_t q_dim = heads.q_dim(), k_dim = heads.k_dim(), dim = heads.key_dim,
               gate_dim = spec.q_gate_dim();
  if (!weights.attn_qkv_bias.empty()) {
    q_bias = weights.attn_qkv_bias.data();
    k_bias = q_bias + gate_dim + q_dim;
  }
  const bool are_normed = spec.qk_norm != QkNorm::kNone;
  if (!spec.attends() || (!k_bias && !are_normed) || !has_plain_keys(config)) return;
  if (spec.qk_norm == QkNorm::kLayer) return;  // whose sums are more than products with factors

  std::vector<double> q = mean_squares(weights.attn_q.weight, gate_dim, q_dim, q_bias, weights.attn_norm);
  std::vector<double> k = mean_squares(weights.attn_k.weight, 0, k_dim, k_bias, weights.attn_norm);
  const size_t n_pairs = config.rope(layer).n_pairs();
  const auto join_pairs = [&] {
    join_rotary_pairs(q, dim, n_pairs);
    join_rotary_pairs(k, dim, n_pairs);
  };
  if (are_normed) {
    if (spec.qk_norm_after_rope) join_pairs();
    const bool is_projection = spec.qk_norm == QkNorm::kProjection;
    norm_squares(q, is_projection ? q_dim : dim, weights.attn_q_norm);
    norm_squares(k, is_projection ? k_dim : dim, weights.attn_k_norm);
  }
  join_pairs();
  if (spec.qk_norm == QkNorm::kHead) {  // all heads have the same weights
    q = mean_row(q.data(), q_dim / dim, dim);
    k = mean_row(k.data(), k_dim / dim, dim);
  }
  std::vector<float> factors = balance_heads(q, k, dim);
  weights.has_even_keys = std::any_of(factors.begin(), factors.end(), [](float s) { return s != 1.0f; });
  if (!weights.has_even_keys) return;
  weights.key_factors.assign(factors.begin() + static_cast<ptrdiff_t>(q.size()), factors.end());
  if (!are_normed) {
    weights.key_balance = std::move(factors);
    return;
  }
  for (size_t i = 0; i < q.size(); ++i) weights.attn_q_norm[i] *= factors[i];
  for (size_t i = 0; i < k.size(); ++i) weights.attn_k_norm[i] *= factors[q.size() + i];
}

}  // namespace edgeh2o
