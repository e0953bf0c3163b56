// Kernels of recurrences: gated delta nets, one by one and in chunks, and those of Mamba-1 and Mamba-2.
#include <cmath>
#include <limits>
#include <vector>

#include "tests/kernels/selftest/check.h"
#include "tests/kernels/selftest/random.h"

namespace edgeh2o::selftest {
namespace {

// The gated delta rule in double precision, of kDeltaColumns columns at a time.
struct DeltaCase {
  size_t n_tokens, key_dim, n_slices, width, n_decays;
  std::vector<float> q, k, v, decays, rates, state, out;

  DeltaCase(size_t n, size_t dim, size_t slices, bool by_row, Random& random)
      : n_tokens(n),
        key_dim(dim),
        n_slices(slices),
        width(slices * kDeltaColumns),
        n_decays(by_row ? dim : 1) {
    const float length = 1 / std::sqrt(static_cast<float>(dim));
    q = random.uniform_vector(n * dim, -1, 1);
    k = random.uniform_vector(n * dim, -length, length);
    v = random.uniform_vector(n * width, -2, 2);
    decays = random.uniform_vector(n * n_decays, 0.2f, 1);
    rates = random.uniform_vector(n, 0, 1);
    state = random.uniform_vector(dim * width, -1, 1);
    state.resize(state.size() + kGuard, kUntouched);
    out.resize(n * width + kGuard, kUntouched);
  }
  DeltaSlice slice() {
    return {n_tokens,      key_dim,  q.data(),     k.data(), key_dim,      v.data(),   width, n_decays > 1,
            decays.data(), n_decays, rates.data(), 1,        state.data(), out.data(), width};
  }
  void compare(const std::vector<float>& before, Check& check) const {
    const double error = static_cast<double>(10 * n_tokens * (key_dim + 8)) * kEps;
    for (size_t column = 0; column < width; ++column) {
      const size_t first = column / kDeltaColumns * key_dim * kDeltaColumns + column % kDeltaColumns;
      std::vector<double> exact(key_dim);
      for (size_t row = 0; row < key_dim; ++row) exact[row] = before[first + row * kDeltaColumns];
      for (size_t t = 0; t < n_tokens; ++t) {
        double read = 0, want = 0;
        for (size_t row = 0; row < key_dim; ++row) {
          exact[row] *= decays[t * n_decays + (n_decays > 1 ? row : 0)];
          read += exact[row] * k[t * key_dim + row];
        }
        const double d = rates[t] * (v[t * width + column] - read);
        for (size_t row = 0; row < key_dim; ++row) {
          exact[row] += d * k[t * key_dim + row];
          want += exact[row] * q[t * key_dim + row];
        }
        check.near(out[t * width + column], want, error);
      }
      for (size_t row = 0; row < key_dim; ++row) {
        check.near(state[first + row * kDeltaColumns], exact[row], error);
      }
    }
    check.untouched(state, key_dim * width);
    check.untouched(out, n_tokens * width);
  }
};

void check_delta_net(const KernelTable& table, Check& check) {
  Random random(11);
  for (const size_t key_dim : {size_t{2}, size_t{6}, size_t{32}, size_t{128}}) {
    for (const bool by_row : {false, true}) {
      DeltaCase one(5, key_dim, 1, by_row, random);
      const std::vector<float> before = one.state;
      table.delta_net_f32(one.slice());
      one.compare(before, check);
    }
  }
}

void check_delta_net_chunks(const KernelTable& table, Check& check) {
  Random random(13);
  for (const size_t key_dim : {size_t{32}, size_t{96}}) {
    for (const size_t n_tokens : {size_t{1}, size_t{11}, size_t{32}, size_t{75}}) {
      for (const bool by_row : {false, true}) {
        DeltaCase one(n_tokens, key_dim, 2, by_row, random);
        const std::vector<float> before = one.state;
        const size_t size = delta_scratch_size(key_dim, by_row);
        std::vector<float> scratch(size, std::numeric_limits<float>::quiet_NaN());
        scratch.resize(size + kGuard, kUntouched);
        table.delta_net_chunks_f32(one.slice(), one.n_slices, scratch.data());
        one.compare(before, check);
        check.untouched(scratch, size);
      }
    }
  }
}

void check_row_decays(const KernelTable& table, Check& check) {
  Random random(15);
  for (const size_t n : {size_t{1}, size_t{31}, size_t{64}}) {
    for (const float log_floor : {0.0f, -5.0f}) {
      const float a = log_floor < 0 ? 1.5f : -1.5f;
      const std::vector<float> steps = random.uniform_vector(n, -4, 4),
                               biases = random.uniform_vector(n, -2, 2);
      std::vector<float> out = steps;
      out.resize(n + kGuard, kUntouched);
      table.row_decays_f32(out.data(), biases.data(), a, log_floor, n);
      for (size_t i = 0; i < n; ++i) {
        const double step = static_cast<double>(steps[i]) + biases[i];
        const double log =
            log_floor < 0 ? log_floor / (1 + std::exp(-a * step)) : a * std::log1p(std::exp(step));
        check.near(out[i], std::exp(log), 40 * kEps);
      }
      check.untouched(out, n);
    }
  }
}

void check_ssd(const KernelTable& table, Check& check) {
  Random random(12);
  constexpr float kSkip = 0.75f;
  for (const size_t state_dim : {size_t{16}, size_t{48}}) {
    for (const size_t n_tokens : {size_t{1}, size_t{5}, size_t{67}}) {
      const size_t stride = kSsdColumns + 2 * state_dim;
      const std::vector<float> rows = random.uniform_vector(n_tokens * stride, -1, 1),
                               decays = random.uniform_vector(n_tokens, 0, 1),
                               rates = random.uniform_vector(n_tokens, 0, 2);
      std::vector<float> state = random.uniform_vector(state_dim * kSsdColumns, -1, 1),
                         out(n_tokens * kSsdColumns + kGuard, kUntouched);
      std::vector<double> exact(state.begin(), state.end());
      state.resize(state.size() + kGuard, kUntouched);
      const float *x = rows.data(), *b = x + kSsdColumns, *c = b + state_dim;
      table.ssd_f32({n_tokens, state_dim, x, b, c, stride, decays.data(), rates.data(), 1, kSkip,
                     state.data(), out.data(), kSsdColumns});
      // Of sums of products of at most 2 / (1 - decay), which is 20 on average, with 1.
      const double error = static_cast<double>(20 * (state_dim + 8)) * kEps;
      for (size_t t = 0; t < n_tokens; ++t) {
        for (size_t column = 0; column < kSsdColumns; ++column) {
          const double input = x[t * stride + column];
          double want = kSkip * input;
          for (size_t row = 0; row < state_dim; ++row) {
            double& value = exact[row * kSsdColumns + column];
            value = decays[t] * value + b[t * stride + row] * (rates[t] * input);
            want += value * c[t * stride + row];
          }
          check.near(out[t * kSsdColumns + column], want, error);
        }
      }
      for (size_t i = 0; i < exact.size(); ++i) check.near(state[i], exact[i], error);
      check.untouched(state, exact.size());
      check.untouched(out, n_tokens * kSsdColumns);
    }
  }
}

void check_selective_scan(const KernelTable& table, Check& check) {
  Random random(14);
  for (const size_t state_dim : {size_t{16}, size_t{32}}) {
    for (const size_t n_tokens : {size_t{1}, size_t{5}, size_t{67}}) {
      const std::vector<float> x = random.uniform_vector(n_tokens * kScanChannels, -1, 1),
                               steps = random.uniform_vector(n_tokens * kScanChannels, -4, 4),
                               bc = random.uniform_vector(n_tokens * 2 * state_dim, -1, 1),
                               a = random.uniform_vector(state_dim * kScanChannels, -2, -0.1f),
                               skips = random.uniform_vector(kScanChannels, -1, 1);
      std::vector<float> state = random.uniform_vector(state_dim * kScanChannels, -1, 1),
                         out(n_tokens * kScanChannels + kGuard, kUntouched);
      std::vector<double> exact(state.begin(), state.end());
      state.resize(state.size() + kGuard, kUntouched);
      table.selective_scan_f32({n_tokens, state_dim, x.data(), kScanChannels, steps.data(), kScanChannels,
                                bc.data(), bc.data() + state_dim, 2 * state_dim, a.data(), skips.data(),
                                state.data(), out.data(), kScanChannels});
      // States are sums of rates of up to 4 that decay by exp(-0.1 * rate) at the least.
      const double error = static_cast<double>(100 * (state_dim + 8)) * kEps;
      for (size_t t = 0; t < n_tokens; ++t) {
        for (size_t channel = 0; channel < kScanChannels; ++channel) {
          const size_t at = t * kScanChannels + channel;
          const double rate = std::log1p(std::exp(static_cast<double>(steps[at])));
          double want = static_cast<double>(skips[channel]) * x[at];
          for (size_t row = 0; row < state_dim; ++row) {
            double& value = exact[row * kScanChannels + channel];
            value = std::exp(rate * a[row * kScanChannels + channel]) * value +
                    bc[t * 2 * state_dim + row] * (rate * x[at]);
            want += value * bc[(t * 2 + 1) * state_dim + row];
          }
          check.near(out[at], want, error);
        }
      }
      for (size_t i = 0; i < exact.size(); ++i) check.near(state[i], exact[i], error);
      check.untouched(state, exact.size());
      check.untouched(out, n_tokens * kScanChannels);
    }
  }
}

void check_wkv(const KernelTable& table, Check& check) {
  Random random(15);
  for (const size_t dim : {size_t{16}, size_t{48}}) {
    for (const size_t n_tokens : {size_t{1}, size_t{5}, size_t{67}}) {
      const float most = 1.0f / std::sqrt(static_cast<float>(dim));  // directions have length 1 at most
      const std::vector<float> decays = random.uniform_vector(n_tokens * dim, 0, 1),
                               keys = random.uniform_vector(n_tokens * dim, -1, 1),
                               values = random.uniform_vector(n_tokens * dim, -1, 1),
                               directions = random.uniform_vector(n_tokens * dim, -most, most),
                               removals = random.uniform_vector(n_tokens * dim, -most, most),
                               queries = random.uniform_vector(n_tokens * dim, -1, 1);
      std::vector<float> state = random.uniform_vector(dim * kWkvColumns, -1, 1),
                         out(n_tokens * kWkvColumns + kGuard, kUntouched);
      std::vector<double> exact(state.begin(), state.end());
      state.resize(state.size() + kGuard, kUntouched);
      table.wkv_f32({n_tokens, dim, decays.data(), keys.data(), values.data(), directions.data(),
                     removals.data(), queries.data(), dim, state.data(), out.data(), kWkvColumns});
      const double error = static_cast<double>(100 * (dim + 8)) * kEps;
      for (size_t t = 0; t < n_tokens; ++t) {
        for (size_t column = 0; column < kWkvColumns; ++column) {
          double taken = 0.0, want = 0.0;
          for (size_t row = 0; row < dim; ++row) {
            taken += exact[row * kWkvColumns + column] * directions[t * dim + row];
          }
          for (size_t row = 0; row < dim; ++row) {
            double& value = exact[row * kWkvColumns + column];
            const size_t at = t * dim + row;
            value = decays[at] * value - removals[at] * taken +
                    static_cast<double>(keys[at]) * values[t * dim + column];
            want += value * queries[at];
          }
          check.near(out[t * kWkvColumns + column], want, error);
        }
      }
      for (size_t i = 0; i < exact.size(); ++i) check.near(state[i], exact[i], error);
      check.untouched(state, exact.size());
      check.untouched(out, n_tokens * kWkvColumns);
    }
  }
}

void check_wkv6(const KernelTable& table, Check& check) {
  Random random(16);
  for (const size_t dim : {size_t{16}, size_t{48}}) {
    for (const size_t n_tokens : {size_t{1}, size_t{5}, size_t{67}}) {
      const std::vector<float> decays = random.uniform_vector(n_tokens * dim, 0, 1),
                               keys = random.uniform_vector(n_tokens * dim, -1, 1),
                               values = random.uniform_vector(n_tokens * dim, -1, 1),
                               queries = random.uniform_vector(n_tokens * dim, -1, 1),
                               own = random.uniform_vector(n_tokens, -4, 4);
      std::vector<float> state = random.uniform_vector(dim * kWkvColumns, -1, 1),
                         out(n_tokens * kWkvColumns + kGuard, kUntouched);
      std::vector<double> exact(state.begin(), state.end());
      state.resize(state.size() + kGuard, kUntouched);
      table.wkv6_f32({n_tokens, dim, decays.data(), keys.data(), values.data(), queries.data(), dim,
                      own.data(), 1, state.data(), out.data(), kWkvColumns});
      const double error = static_cast<double>(100 * (dim + 8)) * kEps;
      for (size_t t = 0; t < n_tokens; ++t) {
        for (size_t column = 0; column < kWkvColumns; ++column) {
          const auto own_value = static_cast<double>(values[t * dim + column]);
          double want = own[t] * own_value;
          for (size_t row = 0; row < dim; ++row) {
            double& value = exact[row * kWkvColumns + column];
            const size_t at = t * dim + row;
            want += value * queries[at];
            value = decays[at] * value + keys[at] * own_value;
          }
          check.near(out[t * kWkvColumns + column], want, error);
        }
      }
      for (size_t i = 0; i < exact.size(); ++i) check.near(state[i], exact[i], error);
      check.untouched(state, exact.size());
      check.untouched(out, n_tokens * kWkvColumns);
    }
  }
}

void check_key_decays(const KernelTable& table, Check& check) {
  Random random(17);
  for (const size_t n : {size_t{1}, size_t{15}, size_t{70}}) {
    const std::vector<float> biases = random.uniform_vector(n, -1, 1);
    std::vector<float> x = random.uniform_vector(n, -8, 3);
    const std::vector<float> before = x;
    x.resize(n + kGuard, kUntouched);
    table.key_decays_f32(x.data(), biases.data(), n);
    for (size_t i = 0; i < n; ++i) {
      const double step = std::exp(static_cast<double>(before[i] + biases[i]));
      check.near(x[i], std::exp(-step), 40 * kEps);
    }
    check.untouched(x, n);
  }
}

}  // namespace

const std::vector<KernelCheck>& recurrent_checks() {
  static const std::vector<KernelCheck> checks = {
      {"delta_net_f32", check_delta_net},
      {"delta_net_chunks_f32", check_delta_net_chunks},
      {"ssd_f32", check_ssd},
      {"selective_scan_f32", check_selective_scan},
      {"wkv_f32", check_wkv},
      {"wkv6_f32", check_wkv6},
      {"key_decays_f32", check_key_decays},
      {"row_decays_f32", check_row_decays},
  };
  return checks;
}

}  // namespace edgeh2o::selftest
