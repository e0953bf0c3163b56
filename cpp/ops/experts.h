// Mixture of experts: which tokens go through which expert, and their way there and back.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/arena.h"
#include "base/mat_view.h"

namespace edgeh2o {

// The rows of a block sorted by expert: those of expert e are entries [begin[e], begin[e + 1]).
struct ExpertRoutes {
  ExpertRoutes(size_t max_rows, size_t n_experts, size_t n_used, Arena& arena);

  size_t n_experts, n_used;
  size_t* begin;         // [n_experts + 1]
  int32_t* rows;         // [n_rows * n_used] row of the block, ascending within an expert
  float* weights;        // [n_rows * n_used] share of the expert in the row's output
  int32_t* chosen;       // [n_rows][n_used] experts of a row, the most probable first
  float* probabilities;  // [n_rows][n_used] of the chosen ones
};

struct RoutingRule {
  bool is_normalised = true;
  bool is_sigmoid = false;
  const float* biases = nullptr;  // [n_experts], or null
  float scale = 1.0f;
  size_t n_groups = 1, n_groups_used = 1;  // as many experts in each, at most kMaxExpertGroups
};

inline constexpr size_t kMaxExpertGroups = 64;

// Every row takes the n_used experts of highest probability plus bias (of equal ones the first), weighted by
// their probabilities, over the sum of these if is_normalised, times the scale. They are the softmax of the
// logits [n_rows][n_experts], or the sigmoid of each. Groups of neighbours are chosen first, if there are
// several, by the sum of the two highest ranks in each (DeepSeek-V3, 2024, section 2.1.2).
void route_rows(MatView<const float> logits, const RoutingRule& rule, ExpertRoutes& routes);

// What experts [first, first + n) have of the routes of n_rows rows, together: every row once, ascending,
// with the sum of its shares. Returns how many there are; rows and shares have room for n_rows.
size_t join_routes(const ExpertRoutes& routes, size_t first, size_t n, size_t n_rows, int32_t* rows,
                   float* shares);

// An expert that every row goes through: entry i is row i, of share 1 or, with a gate [rows.cols], the
// sigmoid of its product with the row.
void route_all(MatView<const float> rows, const float* gate, ExpertRoutes& routes);

// out[i] = rows[indices[i]] for i < out.rows.
void gather_rows(MatView<const float> rows, const int32_t* indices, MatView<float> out);

// out[indices[i]] += weights[i] * rows[i]; no index stands twice.
void scatter_rows(MatView<const float> rows, const int32_t* indices, const float* weights,
                  MatView<float> out);

}  // namespace edgeh2o
