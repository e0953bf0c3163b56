#include "sparse/h2o_policy.h"

#include <algorithm>

#include "base/check.h"
#include "sparse/policy_registry.h"

namespace edgeh2o {
namespace {

ScoreRule score_rule(const H2OOptions& options) {
  ScoreRule rule;
  rule.is_mean = options.score == H2OScore::kMean || options.score == H2OScore::kLift;
  rule.decay = options.score == H2OScore::kWindow ? 0.0f : options.decay;
  rule.by_values = options.by_values;
  return rule;
}

H2OScore parse_score(const std::string& name) {
  static constexpr std::pair<const char*, H2OScore> kScores[] = {{"sum", H2OScore::kSum},
                                                                 {"mean", H2OScore::kMean},
                                                                 {"lift", H2OScore::kLift},
                                                                 {"window", H2OScore::kWindow}};
  for (const auto& [known, score] : kScores) {
    if (name == known) return score;
  }
  throw_invalid("score = '", name, "'; it is one of sum, mean, lift, window");
}

const PolicyRegistration kH2oRegistration("h2o", {"local", "heavy"},
                                          [](PolicyOptions& settings) -> std::shared_ptr<SparsePolicy> {
                                            H2OOptions options;
                                            options.n_local = settings.count("local", 0);
                                            options.n_heavy = settings.count("heavy", 0);
                                            options.n_sinks = settings.count("sinks", options.n_sinks);
                                            options.score = parse_score(settings.text("score", "sum"));
                                            options.n_window = settings.count("window", options.n_window);
                                            options.decay = settings.number("decay", options.decay);
                                            options.by_values = settings.flag("by_values", options.by_values);
                                            options.n_tail = settings.count("tail", options.n_tail);
                                            return std::make_shared<H2OPolicy>(options);
                                          });

}  // namespace

H2OPolicy::H2OPolicy(const H2OOptions& options) : options_(options), hitters_(score_rule(options)) {
  EH2O_CHECK(options.n_local + options.n_heavy > 0,
             "h2o needs local + heavy >= 1, got 0 + 0; use the dense policy instead");
  EH2O_CHECK(options.decay >= 0.0f && options.decay <= 1.0f, "decay = ", options.decay, " is not in [0, 1]");
  EH2O_CHECK(options.score != H2OScore::kWindow || options.n_window > 0, "window must be at least 1");
}

std::string H2OPolicy::describe() const {
  static constexpr const char* kScores[] = {"sum", "mean", "lift", "window"};
  return "h2o, local " + std::to_string(options_.n_local) + ", heavy " + std::to_string(options_.n_heavy) +
         ", sinks " + std::to_string(options_.n_sinks) + ", score " +
         kScores[static_cast<int>(options_.score)];
}

size_t H2OPolicy::capacity(const PolicyShape& shape) const {
  const size_t most = shape.max_context;
  return std::min(
      std::min(options_.n_sinks, most) + std::min(options_.n_local, most) + std::min(options_.n_heavy, most),
      most);
}

PolicyNeeds H2OPolicy::needs(const PolicyShape& shape) const {
  PolicyNeeds needs;
  needs.column_sums = ColumnSums::kPerPart;
  if (options_.score == H2OScore::kLift) needs.query_weights = QueryWeights::kVisibleKeys;
  if (options_.score == H2OScore::kWindow) {
    needs.query_weights = QueryWeights::kLastQueries;
    needs.n_last_queries = options_.n_window;
  }
  needs.max_scored_memory = capacity(shape);
  needs.n_dense_tail = options_.n_tail;
  needs.looks_at_past = options_.by_values;
  return needs;
}

void H2OPolicy::take_buffers(Arena& arena, const PolicyShape& shape) {
  hitters_.take_buffers(arena, shape, std::vector<size_t>(shape.n_slots(), capacity(shape)));
}

size_t H2OPolicy::state_bytes(const PolicyShape& shape) const {
  Arena arena;
  H2OPolicy(options_).take_buffers(arena, shape);
  return arena.used();
}

void H2OPolicy::allocate(const PolicyShape& shape) {
  arena_ = Arena::of([&](Arena& arena) { take_buffers(arena, shape); });
}

MemorySet H2OPolicy::select_memory(size_t slot, const SelectionInput& input) {
  const size_t most = capacity(shape()), n_local = std::min(options_.n_local, most);
  return hitters_.select(slot, input, {std::min(options_.n_sinks, most - n_local), n_local});
}

}  // namespace edgeh2o
