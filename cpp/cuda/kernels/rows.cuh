// Row-wise kernels: a block per row. Formulas: cpp/kernels/rows-inl.h.
#pragma once

#include "cuda/kernels/arguments.h"

namespace edgeh2o::cuda {

inline constexpr int kRowThreads = 128, kRowWarps = kRowThreads / kWarpSize;

// The sum over all threads of a block of kWarps, in one order.
template <int kWarps>
EH2O_DEVICE float block_sum(float value) {
  EH2O_SHARED_MEMORY;
  float* const sums = reinterpret_cast<float*>(shared_memory);
  const int t = thread_index();
  value = reduce_add<kWarpSize>(value);
  if (t % kWarpSize == 0) sums[t / kWarpSize] = value;
  sync_block();
  float total = 0.0f;
  for (int i = 0; i < kWarps; ++i) total += sums[i];
  return total;
}

// Rounds columns [begin, end) of a row to 8 bits, 32 values at a time: d = max|x| / 127, q = rint(x / d).
// 8 lanes share a block.
template <int kWarps, typename Value>
EH2O_DEVICE void quantise_row(const QuantisedRows& xq, uint32_t row, uint32_t begin, uint32_t end,
                              uint32_t dim, const Value& value) {
  const uint32_t t = static_cast<uint32_t>(thread_index()), lane = t % kWarpSize;
  for (uint32_t base = begin + t / kWarpSize * 128; base < end; base += kWarps * 128) {
    const uint32_t i = base + lane * 4;
    float x[4], largest = 0.0f;
    for (uint32_t e = 0; e < 4; ++e) {
      x[e] = i + e < dim ? value(i + e) : 0.0f;
      largest = larger(largest, magnitude(x[e]));
    }
    largest = reduce_max<8>(largest);
    const float inverse = divide(127.0f, largest);
    const bool is_zero = !(inverse <= 3.40282347e38f);  // zeros, or too small to matter
    uint32_t word = 0;
    for (uint32_t e = 0; e < 4; ++e) {
      const int32_t q = is_zero ? 0 : round_to_int(x[e] * inverse);
      word |= (static_cast<uint32_t>(q) & 0xffu) << (8 * e);
    }
    if (i >= end) continue;  // after the warp's exchanges
    reinterpret_cast<uint32_t*>(xq.q)[(static_cast<size_t>(row) * xq.padded + i) / 4] = word;
    if (lane % 8 == 0) {
      xq.d[(static_cast<size_t>(row) * xq.padded + i) / 32] = is_zero ? 0.0f : divide(largest, 127.0f);
    }
  }
}

// 1 / sqrt(mean(x^2) + eps) of a row.
template <int kWarps>
EH2O_DEVICE float norm_factor(const float* x, uint32_t dim, float eps) {
  float squares = 0.0f;
  EH2O_UNROLL_4
  for (uint32_t i = static_cast<uint32_t>(thread_index()); i < dim; i += kWarps * kWarpSize) {
    squares = multiply_add(x[i], x[i], squares);
  }
  return divide(1.0f, square_root(divide(block_sum<kWarps>(squares), static_cast<float>(dim)) + eps));
}

EH2O_KERNEL(norm_rows, NormArguments, kNormThreads) {
  constexpr int kWarps = kNormThreads / kWarpSize;
  const uint32_t row = static_cast<uint32_t>(block_x()), t = static_cast<uint32_t>(thread_index());
  const uint32_t group = row % a.n_groups;
  const uint32_t from = a.indices ? static_cast<uint32_t>(a.indices[row]) : row / a.n_groups;
  const float* x = a.x + static_cast<size_t>(from) * a.x_stride +
                   static_cast<size_t>(group) * (a.group_stride ? a.group_stride : a.dim);
  const float factor = a.weight ? norm_factor<kWarps>(x, a.dim, a.eps) : 1.0f;
  const float* weight = a.weight ? a.weight + group * a.weight_stride : nullptr;
  const auto value = [&](uint32_t i) { return weight ? x[i] * factor * weight[i] : x[i]; };
  // Before out is written, which may be x.
  if (a.xq.q) quantise_row<kWarps>(a.xq, row, 0, a.xq.padded, a.dim, value);
  if (!a.out) return;
  sync_block();
  float* out = a.out + static_cast<size_t>(row / a.n_groups) * a.out_stride + group * a.dim;
  for (uint32_t i = t; i < a.dim; i += kNormThreads) out[i] = value(i);
}

EH2O_KERNEL(add_rows, AddArguments, kRowThreads) {
  const size_t first = static_cast<size_t>(block_x()) * a.dim;
  const float* y = a.y + first;
  float* x = a.x + first;
  const float factor = a.weight ? norm_factor<kRowWarps>(y, a.dim, a.eps) : 1.0f;
  for (uint32_t i = static_cast<uint32_t>(thread_index()); i < a.dim; i += kRowThreads) {
    x[i] += a.scale * (a.weight ? y[i] * factor * a.weight[i] : y[i]);
  }
}

EH2O_DEVICE float silu(float x) { return divide(x, 1.0f + exponential(-x)); }
EH2O_DEVICE float gelu(float x) {
  const float cubic = multiply_add(x * x * 0.044715f, x, x);
  return divide(x, 1.0f + exponential(cubic * -1.5957691216f));
}

// Of gpt-oss: gate cut at 7, up between -7 and 7.
EH2O_DEVICE float clamped_swiglu(float gate, float up) {
  const float g = smaller(gate, 7.0f), u = larger(smaller(up, 7.0f), -7.0f);
  return divide(g, 1.0f + exponential(g * -1.702f)) * (u + 1.0f);
}

EH2O_KERNEL(mix_rows, MixArguments, kRowThreads) {
  const size_t row = static_cast<size_t>(block_x());
  const int32_t* entries = a.entries + row * a.n_used;
  const float* weights = a.weights + row * a.n_used;
  for (uint32_t d = static_cast<uint32_t>(thread_index()); d < a.dim; d += kRowThreads) {
    float sum = 0.0f;
    for (uint32_t i = 0; i < a.n_used; ++i) {
      sum = multiply_add(weights[i], a.x[static_cast<size_t>(entries[i]) * a.dim + d], sum);
    }
    a.out[row * a.dim + d] = sum;
  }
}

EH2O_KERNEL(gate_rows, GateArguments, kRowThreads) {
  const uint32_t row = static_cast<uint32_t>(block_x());
  const float* gate = a.gate + static_cast<size_t>(row) * a.gate_stride;
  const float* up = a.up + static_cast<size_t>(row) * a.dim;
  const auto value = [&](uint32_t i) {
    if (a.kind == GateKind::kSiluClamped) return clamped_swiglu(gate[i], up[i]);
    if (a.kind == GateKind::kRelu) return larger(gate[i], 0.0f) * up[i];
    if (a.kind == GateKind::kSigmoid) return divide(up[i], 1.0f + exponential(-gate[i]));
    return (a.kind == GateKind::kGelu ? gelu(gate[i]) : silu(gate[i])) * up[i];
  };
  const uint32_t begin = static_cast<uint32_t>(block_y()) * kGateColumns;
  if (a.xq.q) {
    const uint32_t end = a.xq.padded - begin < kGateColumns ? a.xq.padded : begin + kGateColumns;
    quantise_row<kRowWarps>(a.xq, row, begin, end, a.dim, value);
  }
  if (!a.out) return;
  const uint32_t end = a.dim < begin + kGateColumns ? a.dim : begin + kGateColumns;
  float* out = a.out + static_cast<size_t>(row) * a.dim;
  for (uint32_t i = begin + static_cast<uint32_t>(thread_index()); i < end; i += kRowThreads) {
    out[i] = value(i);
  }
}

// RMS norm of a head by its warp; weight [dim], null for ones.
EH2O_DEVICE void norm_head(float* x, uint32_t dim, const float* weight, float eps) {
  const uint32_t lane = static_cast<uint32_t>(thread_index());
  float squares = 0.0f;
  for (uint32_t i = lane; i < dim; i += kWarpSize) squares = multiply_add(x[i], x[i], squares);
  const float mean = divide(reduce_add<kWarpSize>(squares), static_cast<float>(dim));
  const float factor = divide(1.0f, square_root(mean + eps));
  for (uint32_t i = lane; i < dim; i += kWarpSize) x[i] = x[i] * factor * (weight ? weight[i] : 1.0f);
}

// A row of the cache in 8 bits, a block of 32 at a time by the lanes of a warp: d = max|x| / 127 in f16,
// q = rint(x / d). A block with a value that is not finite reads as NaN.
EH2O_DEVICE void store_q8_row(uint8_t* out, const float* x, uint32_t dim) {
  const uint32_t lane = static_cast<uint32_t>(thread_index());
  for (uint32_t i = lane; i < dim; i += kWarpSize, out += kCacheBlockBytes) {
    const float poison = reduce_add<kWarpSize>(x[i] * 0.0f);
    const uint16_t scale = f16_from_f32(divide(reduce_max<kWarpSize>(magnitude(x[i])), 127.0f) + poison);
    const float d = f32_from_f16(scale);
    const float inverse = d > 0.0f && d <= 3.40282347e38f ? divide(1.0f, d) : 0.0f;
    // A scale that is denormal in f16 may be much smaller than max|x| / 127.
    const float q = larger(smaller(x[i] * inverse, 127.0f), -127.0f);
    out[2 + lane] = static_cast<uint8_t>(round_to_int(q));
    if (lane == 0) *reinterpret_cast<uint16_t*>(out) = scale;
  }
}

// A row of the cache, by a warp.
EH2O_DEVICE void store_row(void* rows, DeviceCacheType type, size_t row, const float* x, uint32_t dim) {
  const size_t start = row * dim;
  if (type == DeviceCacheType::kQ8) {
    return store_q8_row(static_cast<uint8_t*>(rows) + start / kCacheBlock * kCacheBlockBytes, x, dim);
  }
  const uint32_t lane = static_cast<uint32_t>(thread_index());
  for (uint32_t i = lane; i < dim; i += kWarpSize) {
    if (type == DeviceCacheType::kF16) {
      static_cast<uint16_t*>(rows)[start + i] = f16_from_f32(x[i]);
    } else {
      static_cast<float*>(rows)[start + i] = x[i];
    }
  }
}

// Pairs (x[i], x[n_pairs + i]) by a warp; out may be x.
EH2O_DEVICE void rotate_pairs(const float* x, float* out, const float* cos, const float* sin,
                              uint32_t n_pairs) {
  for (uint32_t i = static_cast<uint32_t>(thread_index()); i < n_pairs; i += kWarpSize) {
    const float first = x[i], second = x[n_pairs + i], c = cos[i], s = sin[i];
    out[i] = first * c - second * s;
    out[n_pairs + i] = multiply_add(first, s, second * c);
  }
}

// The position of a launch's first row.
template <typename Arguments>
EH2O_DEVICE uint32_t first_of(const Arguments& a) {
  return a.start ? a.first + *a.start : a.first;
}

// A warp per head: those of q, of k, of v.
EH2O_KERNEL(rope_rows, RopeArguments, kWarpSize) {
  const uint32_t head = static_cast<uint32_t>(block_x()), row = static_cast<uint32_t>(block_y());
  const uint32_t lane = static_cast<uint32_t>(thread_index());
  const uint32_t n_heads = a.heads.n_heads, n_kv = a.heads.n_kv_heads, key_dim = a.heads.key_dim;
  const bool is_value = head >= n_heads + n_kv;
  const uint32_t kv_head = head - n_heads - (is_value ? n_kv : 0);
  float* x = a.qkv + static_cast<size_t>(row) * a.stride +
             (is_value ? (n_heads + n_kv) * key_dim + kv_head * a.heads.value_dim : head * key_dim);
  if (!is_value) {
    const size_t angles = static_cast<size_t>(row) * a.n_pairs;
    rotate_pairs(x, x, a.cos + angles, a.sin + angles, a.n_pairs);
  }
  sync_warp();
  const uint32_t dim = is_value ? a.heads.value_dim : key_dim;
  const float* const weight = is_value ? nullptr : head < n_heads ? a.q_norm : a.k_norm;
  if (weight || (is_value && a.norms_values)) norm_head(x, dim, weight, a.eps);
  if (head < n_heads) {
    if (!a.q_factors) return;
    const float factor = a.q_factors[row];
    for (uint32_t i = lane; i < dim; i += kWarpSize) x[i] *= factor;
    return;
  }
  store_row(is_value ? a.cache.v : a.cache.k, is_value ? a.cache.v_type : a.cache.k_type,
            static_cast<size_t>(kv_head) * a.cache.max_context + first_of(a) + row, x, dim);
}

// A warp per query head, and one for the row that is cached.
EH2O_KERNEL(latent_rows, LatentArguments, kWarpSize) {
  const uint32_t head = static_cast<uint32_t>(block_x()), row_dim = a.rank + a.rope_dim;
  const size_t row = static_cast<size_t>(block_y()), angles = row * (a.rope_dim / 2);
  const float *const cos = a.cos + angles, *const sin = a.sin + angles;
  float* const out = a.qkv + row * a.stride + head * row_dim;
  if (head < a.n_heads) {
    const uint32_t head_dim = a.nope_dim + a.rope_dim;
    const float* const x = a.heads + (row * a.n_heads + head) * head_dim + a.nope_dim;
    return rotate_pairs(x, out + a.rank, cos, sin, a.rope_dim / 2);
  }
  norm_head(out, a.rank, a.norm, a.eps);
  rotate_pairs(out + a.rank, out + a.rank, cos, sin, a.rope_dim / 2);
  sync_warp();
  store_row(a.cache.k, a.cache.k_type, first_of(a) + row, out, row_dim);
}

}  // namespace edgeh2o::cuda
