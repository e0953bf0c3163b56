#include "ops/experts.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/parallel.h"

namespace edgeh2o {
namespace {

// As llama.cpp: the smallest normal number of half precision, lest nothing be divided by nothing.
constexpr float kLeastSum = 6.103515625e-5f;

// A bit for every group that is used.
template <typename Rank>
uint64_t choose_groups(const Rank& rank, const RoutingRule& rule, size_t n_experts) {
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  float scores[kMaxExpertGroups];
  const size_t group_size = n_experts / rule.n_groups;
  for (size_t group = 0; group < rule.n_groups; ++group) {
    float best = kNone, second = kNone;
    for (size_t e = group * group_size; e < (group + 1) * group_size; ++e) {
      const float own = rank(e);
      second = std::max(second, std::min(best, own));
      best = std::max(best, own);
    }
    scores[group] = best + (group_size > 1 ? second : 0.0f);
  }
  uint64_t chosen = 0;
  for (size_t i = 0; i < rule.n_groups_used; ++i) {
    size_t best = rule.n_groups;
    for (size_t group = 0; group < rule.n_groups; ++group) {
      if ((chosen >> group & 1) == 0 && (best == rule.n_groups || scores[group] > scores[best])) best = group;
    }
    chosen |= uint64_t{1} << best;
  }
  return chosen;
}

void route_row(const float* logits, const RoutingRule& rule, const ExpertRoutes& routes, int32_t* chosen,
               float* probabilities) {
  const float highest = *std::max_element(logits, logits + routes.n_experts);
  float sum = 0.0f;
  for (size_t e = 0; !rule.is_sigmoid && e < routes.n_experts; ++e) sum += std::exp(logits[e] - highest);
  const auto probability = [&](size_t e) {
    return rule.is_sigmoid ? 1.0f / (1.0f + std::exp(-logits[e])) : std::exp(logits[e] - highest) / sum;
  };
  // Logits and their probabilities are in one order; only for sums do the latter have to be known.
  const auto rank = [&](size_t e) {
    if (rule.biases) return probability(e) + rule.biases[e];
    return rule.n_groups > 1 ? probability(e) : logits[e];
  };
  const uint64_t groups = rule.n_groups > 1 ? choose_groups(rank, rule, routes.n_experts) : ~uint64_t{0};
  const size_t group_size = routes.n_experts / rule.n_groups;
  for (size_t i = 0; i < routes.n_used; ++i) {
    int32_t best = -1;
    float best_rank = 0.0f;
    for (size_t e = 0; e < routes.n_experts; ++e) {
      if ((groups >> e / group_size & 1) == 0) continue;
      const auto expert = static_cast<int32_t>(e);
      if (std::find(chosen, chosen + i, expert) != chosen + i) continue;
      const float own = rank(e);
      if (best < 0 || own > best_rank) best = expert, best_rank = own;
    }
    chosen[i] = best;
    probabilities[i] = probability(static_cast<size_t>(best));
  }
}

}  // namespace

ExpertRoutes::ExpertRoutes(size_t max_rows, size_t n_experts, size_t n_used, Arena& arena)
    : n_experts(n_experts),
      n_used(n_used),
      begin(arena.take<size_t>(n_experts == 0 ? 0 : n_experts + 1)),
      rows(arena.take<int32_t>(max_rows * n_used)),
      weights(arena.take<float>(max_rows * n_used)),
      chosen(arena.take<int32_t>(max_rows * n_used)),
      probabilities(arena.take<float>(max_rows * n_used)) {}

void route_rows(MatView<const float> logits, const RoutingRule& rule, ExpertRoutes& routes) {
  const size_t n_used = routes.n_used, n_entries = logits.rows * n_used;
  parallel_for(logits.rows, [&](size_t row, size_t) {
    route_row(logits.data + row * logits.stride, rule, routes, routes.chosen + row * n_used,
              routes.probabilities + row * n_used);
  });
  // Counting sort: begin[e + 1] counts expert e, then becomes the end of its entries.
  std::fill_n(routes.begin, routes.n_experts + 1, size_t{0});
  for (size_t i = 0; i < n_entries; ++i) ++routes.begin[routes.chosen[i] + 1];
  for (size_t e = 0; e < routes.n_experts; ++e) routes.begin[e + 1] += routes.begin[e];
  for (size_t row = logits.rows; row-- > 0;) {
    const float* probabilities = routes.probabilities + row * n_used;
    float sum = rule.is_normalised ? 0.0f : 1.0f;
    for (size_t i = 0; rule.is_normalised && i < n_used; ++i) sum += probabilities[i];
    for (size_t i = 0; i < n_used; ++i) {
      const size_t entry = --routes.begin[routes.chosen[row * n_used + i] + 1];
      routes.rows[entry] = static_cast<int32_t>(row);
      routes.weights[entry] = probabilities[i] / std::max(sum, kLeastSum) * rule.scale;
    }
  }
  // Every end has moved to its beginning, one place too far on.
  std::copy(routes.begin + 1, routes.begin + routes.n_experts + 1, routes.begin);
  routes.begin[routes.n_experts] = n_entries;
}

size_t join_routes(const ExpertRoutes& routes, size_t first, size_t n, size_t n_rows, int32_t* rows,
                   float* shares) {
  std::fill_n(shares, n_rows, 0.0f);
  for (size_t i = routes.begin[first]; i < routes.begin[first + n]; ++i) {
    shares[routes.rows[i]] += routes.weights[i];
  }
  size_t count = 0;
  for (size_t row = 0; row < n_rows; ++row) {
    if (shares[row] == 0.0f) continue;
    rows[count] = static_cast<int32_t>(row);
    shares[count++] = shares[row];
  }
  return count;
}

void route_all(MatView<const float> rows, const float* gate, ExpertRoutes& routes) {
  parallel_for(rows.rows, [&](size_t i, size_t) {
    double product = 0.0;
    for (size_t c = 0; gate && c < rows.cols; ++c) {
      product += static_cast<double>(gate[c]) * static_cast<double>(rows.data[i * rows.stride + c]);
    }
    routes.rows[i] = static_cast<int32_t>(i);
    routes.weights[i] = gate ? static_cast<float>(1.0 / (1.0 + std::exp(-product))) : 1.0f;
  });
}

void gather_rows(MatView<const float> rows, const int32_t* indices, MatView<float> out) {
  parallel_for(out.rows, [&](size_t i, size_t) {
    std::memcpy(out.data + i * out.stride, rows.data + static_cast<size_t>(indices[i]) * rows.stride,
                out.cols * sizeof(float));
  });
}

void scatter_rows(MatView<const float> rows, const int32_t* indices, const float* weights,
                  MatView<float> out) {
  parallel_for(rows.rows, [&](size_t i, size_t) {
    const float* row = rows.data + i * rows.stride;
    float* sum = out.data + static_cast<size_t>(indices[i]) * out.stride;
    for (size_t c = 0; c < rows.cols; ++c) sum[c] += weights[i] * row[c];
  });
}

}  // namespace edgeh2o
