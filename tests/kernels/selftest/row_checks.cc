// Row-wise kernels.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels/streams.h"
#include "tests/kernels/selftest/check.h"
#include "tests/kernels/selftest/random.h"

namespace edgeh2o::selftest {
namespace {

const size_t kLengths[] = {1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129};

// Calls run(out, n, random) for all lengths; out has n untouched elements and a guard, which is checked.
template <typename Run>
void for_each_length(Check& check, const Run& run) {
  Random random(9);
  for (const size_t n : kLengths) {
    std::vector<float> out(n + kGuard, kUntouched);
    run(out, n, random);
    check.untouched(out, n);
  }
}

void check_rms_norm(const KernelTable& table, Check& check) {
  for_each_length(check, [&](std::vector<float>& out, size_t n, Random& random) {
    const std::vector<float> x = random.uniform_vector(n, -5, 5), weight = random.uniform_vector(n, 0, 2);
    table.rms_norm_f32(out.data(), x.data(), weight.data(), n, 1e-5f);
    double squares = 0;
    for (const float value : x) squares += double{value} * value;
    const double scale = 1 / std::sqrt(squares / static_cast<double>(n) + double{1e-5f});
    for (size_t i = 0; i < n; ++i) {
      const double want = x[i] * scale * weight[i];
      check.near(out[i], want, static_cast<double>(n + 6) * kEps * std::fabs(want));
    }
  });
}

// Panels are written from the comment of the kernel: [keys / nr][key_dim][nr].
void check_index_scores(const KernelTable& table, Check& check) {
  Random random(31);
  const size_t nr = table.layout.panel_cols;
  for (const size_t dim : {8, 40, 128}) {
    for (const size_t n_heads : {1, 5, 64}) {
      for (const size_t n_keys : {size_t{1}, nr, 2 * nr + 3}) {
        const std::vector<float> q = random.uniform_vector(n_heads * dim, -1, 1),
                                 weights = random.uniform_vector(n_heads, -1, 1),
                                 keys = random.uniform_vector(n_keys * dim, -1, 1);
        std::vector<float> panels((n_keys + nr - 1) / nr * nr * dim), out(n_keys + kGuard, kUntouched);
        for (size_t i = 0; i < keys.size(); ++i) {
          const size_t key = i / dim;
          panels[(key / nr * dim + i % dim) * nr + key % nr] = keys[i];
        }
        table.index_scores_f32(out.data(), q.data(), weights.data(), n_heads, panels.data(), n_keys, dim);
        for (size_t key = 0; key < n_keys; ++key) {
          double want = 0, size = 0;
          for (size_t head = 0; head < n_heads; ++head) {
            double product = 0;
            for (size_t i = 0; i < dim; ++i) product += double{q[head * dim + i]} * keys[key * dim + i];
            want += weights[head] * std::fmax(product, 0);
            size += std::fabs(weights[head]) * static_cast<double>(dim);
          }
          check.near(out[key], want, static_cast<double>(dim + n_heads) * kEps * size);
        }
        check.untouched(out, n_keys);
      }
    }
  }
}

void check_rope(const KernelTable& table, Check& check) {
  Random random(10);
  for (const size_t n : kLengths) {
    std::vector<float> x = random.uniform_vector(2 * n, -5, 5), cos(n), sin(n);
    for (size_t i = 0; i < n; ++i) {
      const float angle = random.uniform(-3, 3);
      cos[i] = std::cos(angle);
      sin[i] = std::sin(angle);
    }
    std::vector<float> out = x;
    out.resize(2 * n + kGuard, kUntouched);
    table.rope_f32(out.data(), cos.data(), sin.data(), n);
    for (size_t i = 0; i < n; ++i) {
      const double a = x[i], b = x[n + i], c = cos[i], s = sin[i];
      check.near(out[i], a * c - b * s, 2 * kEps * (std::fabs(a * c) + std::fabs(b * s)));
      check.near(out[n + i], a * s + b * c, 2 * kEps * (std::fabs(a * s) + std::fabs(b * c)));
    }
    check.untouched(out, 2 * n);
  }
}

void check_swiglu(const KernelTable& table, Check& check) {
  for_each_length(check, [&](std::vector<float>& out, size_t n, Random& random) {
    for (const float range : {1.0f, 20.0f, 150.0f}) {  // exp overflows and vanishes within the last
      const std::vector<float> gate = random.uniform_vector(n, -range, range),
                               up = random.uniform_vector(n, -3, 3);
      for (const bool in_place : {false, true}) {
        if (in_place) std::memcpy(out.data(), gate.data(), n * sizeof(float));
        table.swiglu_f32(out.data(), in_place ? out.data() : gate.data(), up.data(), n);
        for (size_t i = 0; i < n; ++i) {
          const double want = gate[i] / (1 + std::exp(-double{gate[i]})) * up[i];
          check.near(out[i], want, 8 * kEps * std::fabs(want) + 1e-35);
        }
      }
    }
    float nan = std::numeric_limits<float>::quiet_NaN(), one = 1, result = 0;
    table.swiglu_f32(&result, &nan, &one, 1);
    check.equal(result, nan);
  });
}

void check_geglu(const KernelTable& table, Check& check) {
  for_each_length(check, [&](std::vector<float>& out, size_t n, Random& random) {
    const std::vector<float> gate = random.uniform_vector(n, -8, 8), up = random.uniform_vector(n, -3, 3);
    table.geglu_f32(out.data(), gate.data(), up.data(), n);
    for (size_t i = 0; i < n; ++i) {
      const double g = gate[i], u = std::sqrt(2 / std::acos(-1.0)) * (g + 0.044715 * g * g * g);
      const double want = g / (1 + std::exp(-2 * u)) * up[i];
      check.near(out[i], want, 100 * kEps * std::fabs(want) + 1e-35);
    }
  });
}

void check_reglu(const KernelTable& table, Check& check) {
  for_each_length(check, [&](std::vector<float>& out, size_t n, Random& random) {
    const std::vector<float> gate = random.uniform_vector(n, -8, 8), up = random.uniform_vector(n, -3, 3);
    table.reglu_f32(out.data(), gate.data(), up.data(), n);
    for (size_t i = 0; i < n; ++i) check.equal(out[i], std::max(gate[i], 0.0f) * up[i]);
  });
}

void check_layer_norm(const KernelTable& table, Check& check) {
  for_each_length(check, [&](std::vector<float>& out, size_t n, Random& random) {
    const std::vector<float> x = random.uniform_vector(n, 2, 5), weight = random.uniform_vector(n, -2, 2),
                             bias = random.uniform_vector(n, -2, 2);
    for (const bool has_bias : {false, true}) {
      table.layer_norm_f32(out.data(), x.data(), weight.data(), has_bias ? bias.data() : nullptr, n, 1e-5f);
      double mean = 0, variance = 0;
      for (size_t i = 0; i < n; ++i) mean += double{x[i]} / static_cast<double>(n);
      for (size_t i = 0; i < n; ++i) variance += (x[i] - mean) * (x[i] - mean) / static_cast<double>(n);
      const double scale = 1 / std::sqrt(variance + 1e-5);
      for (size_t i = 0; i < n; ++i) {
        const double want = (x[i] - mean) * scale * weight[i] + (has_bias ? bias[i] : 0.0f);
        check.near(out[i], want, 100 * kEps * (5 * scale * std::fabs(double{weight[i]}) + 2));
      }
    }
  });
}

void check_ungated(const KernelTable& table, Check& check) {
  for_each_length(check, [&](std::vector<float>& out, size_t n, Random& random) {
    const std::vector<float> x = random.uniform_vector(n, -8, 8);
    table.gelu_f32(out.data(), x.data(), nullptr, n);
    for (size_t i = 0; i < n; ++i) {
      const double v = x[i], u = std::sqrt(2 / std::acos(-1.0)) * (v + 0.044715 * v * v * v);
      const double want = v / (1 + std::exp(-2 * u));
      check.near(out[i], want, 100 * kEps * std::fabs(want) + 1e-35);
    }
    table.xielu_f32(out.data(), x.data(), 0.9f, 0.7f, 0.5f, -1e-6f, n);
    for (size_t i = 0; i < n; ++i) {
      const double v = x[i], below = double{0.7f} * (std::expm1(std::min(v, -1e-6)) - v);
      const double want = (v > 0 ? double{0.9f} * v * v : below) + 0.5 * v;
      check.near(out[i], want, 100 * kEps * (std::fabs(want) + 1));
    }
  });
}

void check_clamped_swiglu(const KernelTable& table, Check& check) {
  for_each_length(check, [&](std::vector<float>& out, size_t n, Random& random) {
    const std::vector<float> gate = random.uniform_vector(n, -12, 12), up = random.uniform_vector(n, -12, 12);
    table.swiglu_clamped_f32(out.data(), gate.data(), up.data(), n);
    for (size_t i = 0; i < n; ++i) {
      const double g = std::min(double{gate[i]}, 7.0), u = std::max(-7.0, std::min(double{up[i]}, 7.0));
      const double want = g / (1 + std::exp(-1.702 * g)) * (u + 1);
      check.near(out[i], want, 100 * kEps * (std::fabs(want) + std::fabs(g)));
    }
  });
}

void check_cut_off(const KernelTable& table, Check& check) {
  for_each_length(check, [&](std::vector<float>& out, size_t n, Random& random) {
    if (n < 2) return;
    const std::vector<float> x = random.uniform_vector(n, -8, 12);
    std::memcpy(out.data(), x.data(), n * sizeof(float));
    table.cut_off_f32(out.data(), 0.7f, n);
    double mean = 0, squares = 0;
    for (size_t i = 0; i < n; ++i) mean += double{x[i]} / static_cast<double>(n);
    for (size_t i = 0; i < n; ++i) squares += (x[i] - mean) * (x[i] - mean);
    const double cutoff = mean + double{0.7f} * std::sqrt(squares / static_cast<double>(n - 1));
    for (size_t i = 0; i < n; ++i) check.near(out[i], std::max(x[i] - cutoff, 0.0), 40 * kEps);
  });
}

void check_match_size(const KernelTable& table, Check& check) {
  for_each_length(check, [&](std::vector<float>& out, size_t n, Random& random) {
    const std::vector<float> x = random.uniform_vector(n, 1, 8), like = random.uniform_vector(n, -2, 2);
    std::memcpy(out.data(), x.data(), n * sizeof(float));
    table.match_size_f32(out.data(), like.data(), n);
    double squares = 0, wanted = 0;
    for (size_t i = 0; i < n; ++i) {
      squares += double{x[i]} * x[i];
      wanted += double{like[i]} * like[i];
    }
    for (size_t i = 0; i < n; ++i) check.near(out[i], x[i] * std::sqrt(wanted / squares), 20 * kEps);
  });
}

// The streams lie apart: what is between them stays as it is.
void check_predict_streams(const KernelTable& table, Check& check) {
  for_each_length(check, [&](std::vector<float>&, size_t n, Random& random) {
    const size_t stride = n + 3;
    const std::vector<float> x = random.uniform_vector(kStreams * stride, -5, 5),
                             mixture = random.uniform_vector(kStreams * kStreams, -1, 1);
    std::vector<float> streams = x;
    table.predict_streams_f32(streams.data(), stride, mixture.data(), n);
    for (size_t k = 0; k < kStreams; ++k) {
      for (size_t i = 0; i < stride; ++i) {
        double want = x[k * stride + i];
        for (size_t j = 0; i < n && j < kStreams; ++j) {
          want += double{mixture[k * kStreams + j]} * x[j * stride + i];
        }
        check.near(streams[k * stride + i], want, i < n ? 60 * kEps : 0);
      }
    }
  });
}

void check_correct_streams(const KernelTable& table, Check& check) {
  for_each_length(check, [&](std::vector<float>&, size_t n, Random& random) {
    const size_t stride = n + 3;
    const std::vector<float> x = random.uniform_vector(kStreams * stride, -5, 5),
                             computed = random.uniform_vector(n, -5, 5),
                             shares = random.uniform_vector(kStreams, 0, 2);
    std::vector<float> streams = x;
    table.correct_streams_f32(streams.data(), stride, computed.data(), shares.data(), n);
    for (size_t k = 0; k < kStreams; ++k) {
      for (size_t i = 0; i < stride; ++i) {
        double want = x[k * stride + i];
        if (i < n) want += double{shares[k]} * (double{computed[i]} - x[i]);
        check.near(streams[k * stride + i], want, i < n ? 60 * kEps : 0);
      }
    }
  });
}

void check_soft_cap(const KernelTable& table, Check& check) {
  for_each_length(check, [&](std::vector<float>& out, size_t n, Random& random) {
    for (const float cap : {0.5f, 30.0f}) {
      const std::vector<float> x = random.uniform_vector(n, -100, 100);
      std::memcpy(out.data(), x.data(), n * sizeof(float));
      table.soft_cap_f32(out.data(), cap, n);
      for (size_t i = 0; i < n; ++i) {
        check.near(out[i], cap * std::tanh(double{x[i]} / cap), 4 * kEps * cap);
      }
    }
  });
}

void check_add(const KernelTable& table, Check& check) {
  for_each_length(check, [&](std::vector<float>& out, size_t n, Random& random) {
    const std::vector<float> x = random.uniform_vector(n, -5, 5);
    table.add_f32(out.data(), x.data(), n);
    for (size_t i = 0; i < n; ++i) check.equal(out[i], kUntouched + x[i]);
  });
}

void check_multiply(const KernelTable& table, Check& check) {
  for_each_length(check, [&](std::vector<float>& out, size_t n, Random& random) {
    const std::vector<float> x = random.uniform_vector(n, -5, 5), y = random.uniform_vector(n, -5, 5);
    table.multiply_f32(out.data(), x.data(), y.data(), n);
    for (size_t i = 0; i < n; ++i) check.equal(out[i], x[i] * y[i]);
  });
}

void check_convolve(const KernelTable& table, Check& check) {
  for_each_length(check, [&](std::vector<float>& out, size_t n, Random& random) {
    constexpr size_t kTaps = 4;
    const std::vector<float> x = random.uniform_vector(kTaps * n, -5, 5),
                             weights = random.uniform_vector(kTaps * n, -2, 2);
    const float* taps[kTaps];
    for (size_t j = 0; j < kTaps; ++j) taps[j] = x.data() + j * n;
    table.convolve_f32(out.data(), taps, weights.data(), n, kTaps, n);
    for (size_t i = 0; i < n; ++i) {
      double want = 0, size = 0;
      for (size_t j = 0; j < kTaps; ++j) {
        const double term = double{x[j * n + i]} * weights[j * n + i];
        want += term;
        size += std::fabs(term);
      }
      check.near(out[i], want, kTaps * kEps * size);
    }
  });
}

void check_gate(const KernelTable& table, Check& check) {
  for_each_length(check, [&](std::vector<float>& out, size_t n, Random& random) {
    const std::vector<float> gate = random.uniform_vector(n, -20, 20), up = random.uniform_vector(n, -3, 3);
    table.gate_f32(out.data(), gate.data(), up.data(), n);
    for (size_t i = 0; i < n; ++i) {
      const double want = up[i] / (1 + std::exp(-double{gate[i]}));
      check.near(out[i], want, 8 * kEps * std::fabs(want) + 1e-35);
    }
  });
}

void check_scale(const KernelTable& table, Check& check) {
  for_each_length(check, [&](std::vector<float>& out, size_t n, Random& random) {
    const std::vector<float> x = random.uniform_vector(n, -5, 5);
    table.scale_f32(out.data(), x.data(), 0.3f, n);
    for (size_t i = 0; i < n; ++i) check.equal(out[i], x[i] * 0.3f);
  });
}

void check_load_f16(const KernelTable& table, Check& check) {
  std::vector<uint16_t> x(1 << 16);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<uint16_t>(i);
  std::vector<float> out(x.size());
  table.load_f32_f16(out.data(), x.data(), x.size());
  for (size_t i = 0; i < x.size(); ++i) check.equal(out[i], f64_from_f16(x[i]));
  for_each_length(check, [&](std::vector<float>& tail, size_t n, Random& random) {
    const size_t first = random.next() % 30000;
    table.load_f32_f16(tail.data(), x.data() + first, n);
    for (size_t i = 0; i < n; ++i) check.equal(tail[i], f64_from_f16(x[first + i]));
  });
}

}  // namespace

const std::vector<KernelCheck>& row_checks() {
  static const std::vector<KernelCheck> checks = {
      {"rms_norm_f32", check_rms_norm},
      {"index_scores_f32", check_index_scores},
      {"rope_f32", check_rope},
      {"swiglu_f32", check_swiglu},
      {"geglu_f32", check_geglu},
      {"swiglu_clamped_f32", check_clamped_swiglu},
      {"reglu_f32", check_reglu},
      {"layer_norm_f32", check_layer_norm},
      {"gelu_f32", check_ungated},
      {"soft_cap_f32", check_soft_cap},
      {"cut_off_f32", check_cut_off},
      {"match_size_f32", check_match_size},
      {"predict_streams_f32", check_predict_streams},
      {"correct_streams_f32", check_correct_streams},
      {"add_f32", check_add},
      {"multiply_f32", check_multiply},
      {"convolve_f32", check_convolve},
      {"gate_f32", check_gate},
      {"scale_f32", check_scale},
      {"load_f32_f16", check_load_f16},
  };
  return checks;
}

}  // namespace edgeh2o::selftest
