#include "sparse/headwise_decode.h"

#include <algorithm>

#include "base/check.h"

namespace edgeh2o {
namespace {

// Pages of 16 lose twice as much with as many positions.
constexpr size_t kPageSize = 4;
// Queries at the end of a prompt by which positions are judged: 16 and 64 choose as well.
constexpr size_t kSampledQueries = 32;
// By fewer nothing is chosen: of a prompt that short turns have brought to its length in a longer session.
constexpr float kLeastSampled = 8.0f;
// Nothing is chosen of shorter prompts, which end with more queries before they are long enough than count.
// 512 tokens of SmolLM2-135M took 8 % longer with samples.
constexpr size_t kUnsampledPart = 2;

}  // namespace

HeadwiseDecode::HeadwiseDecode(const HeadwiseOptions& options, PageSums& sums)
    : options_(options),
      budgets_(options.decode_budgets.empty() ? options.budgets : options.decode_budgets),
      hitters_({/*is_mean=*/true, /*decay=*/1.0f}),
      landmarks_(sums, /*spread=*/0.0f),
      pages_(kPageSize, options.decode_pages, 2 * options.decode_pages) {
  EH2O_CHECK(!options.by_query_head || options.decode_from == SIZE_MAX || !options.decode_budgets.empty(),
             "generated tokens read by KV heads: by_query_head with decode_from needs decode_budgets");
  for (const size_t budget : budgets_) EH2O_CHECK(budget > 0, "a budget is 0; it must be at least 1");
}

bool HeadwiseDecode::has_budgets() const {
  return std::any_of(budgets_.begin(), budgets_.end(),
                     [](size_t budget) { return budget != HeadwiseOptions::kFull; });
}

bool HeadwiseDecode::is_used(const PolicyShape& shape) const {
  return options_.decode_from <= std::min(shape.max_context, options_.decode_until) && has_budgets();
}

PromptLengths HeadwiseDecode::rounded_prompts(size_t slot) const {
  return budgets_[slot] == HeadwiseOptions::kFull && has_budgets() ? served() : PromptLengths{};
}

bool HeadwiseDecode::has_pages(const PolicyShape& shape) const {
  return options_.decode_pages > 0 && is_used(shape) &&
         shape.max_context >= 2 * options_.decode_pages * kPageSize;
}

void HeadwiseDecode::add_needs(const PolicyShape& shape, PolicyNeeds& needs) const {
  if (!is_used(shape)) return;
  EH2O_CHECK(budgets_.size() == shape.n_slots(), budgets_.size(), " decode_budgets do not fit ",
             shape.n_layers(), " layers with ", shape.n_slots(), " KV heads");
  needs.ends_prompts = true;
  needs.n_sampled_queries = kSampledQueries;
  needs.sampled_from = options_.decode_from / kUnsampledPart;
}

// A memory set, and as many recent positions again as it holds.
size_t HeadwiseDecode::capacity(const PolicyShape& shape, size_t slot) const {
  if (!is_used(shape) || budgets_[slot] == HeadwiseOptions::kFull) return 0;
  return std::min(std::min(budgets_[slot], shape.max_context) + options_.n_local, shape.max_context);
}

std::vector<bool> HeadwiseDecode::landmark_slots(const PolicyShape& shape) const {
  std::vector<bool> result;
  for (size_t slot = 0; slot < shape.n_slots(); ++slot) result.push_back(capacity(shape, slot) > 0);
  return result;
}

void HeadwiseDecode::take_buffers(Arena& arena, const PolicyShape& shape) {
  shape_ = shape;
  is_used_ = is_used(shape);
  std::vector<size_t> capacities;
  has_pages_.clear();
  max_positions_ = 0;
  for (size_t slot = 0; slot < shape.n_slots(); ++slot) {
    capacities.push_back(capacity(shape, slot));
    max_positions_ = std::max(max_positions_, capacities.back());
    has_pages_.push_back(capacities.back() == 0 && has_pages(shape));
  }
  chooses_ = std::find(has_pages_.begin(), has_pages_.end(), true) != has_pages_.end();
  if (!is_used_) return;
  hitters_.take_buffers(arena, shape, capacities);
  landmarks_.take_buffers(arena, shape);
  pages_.take_buffers(arena, shape, has_pages_);
  positions_ = arena.take<int32_t>(shape.max_layer_slots * max_positions_);
}

void HeadwiseDecode::begin_prompt() {
  if (!is_used_) return;
  hitters_.begin_prompt();
  pages_.begin_prompt();
}

void HeadwiseDecode::set_budgets(const std::vector<size_t>& budgets) {
  EH2O_CHECK(budgets.empty() || budgets.size() == budgets_.size(), budgets.size(), " decode_budgets for ",
             budgets_.size(), " KV heads");
  for (size_t slot = 0; slot < budgets.size(); ++slot) {
    EH2O_CHECK(
        budgets[slot] > 0 && (budgets[slot] <= budgets_[slot] || budgets[slot] == HeadwiseOptions::kFull),
        "a budget of ", budgets[slot], " is 0 or more than the ", budgets_[slot], " that there is room for");
  }
  if (budgets.empty()) {
    std::fill(budgets_.begin(), budgets_.end(), HeadwiseOptions::kFull);
  } else {
    budgets_ = budgets;
  }
}

void HeadwiseDecode::observe_sample(size_t slot, size_t n_queries, Span<const float> sums) {
  hitters_.observe_sample(slot, n_queries, kSampledQueries, sums);
}

void HeadwiseDecode::save(ByteWriter& out) const {
  ByteWriter part;
  if (is_used_) hitters_.save(part);
  out.put<uint64_t>(part.bytes().size());
  out.put_array(part.bytes().data(), part.bytes().size());
}

void HeadwiseDecode::load(size_t n_tokens, ByteReader& in) {
  const auto n_bytes = in.take<uint64_t>();
  ByteReader part = in.take_part(n_bytes);
  if (!is_used_ || n_bytes == 0) return;
  hitters_.load(n_tokens, part);
  part.check_end();
}

size_t HeadwiseDecode::prompt_rows(const PolicyShape& shape, size_t slot) const {
  const size_t n_positions = capacity(shape, slot);
  return n_positions > 0 ? n_positions + landmarks_.max_rows(shape) : 0;
}

MemorySet HeadwiseDecode::end_prompt(size_t slot, const SelectionInput& input) {
  const size_t n_tokens = input.chunk.begin, n_positions = capacity(shape_, slot);
  const MemorySet everything = MemorySet::all_of({0, n_tokens});
  if (!served().hold(n_tokens)) return everything;
  if (has_pages_[slot]) pages_.end_prompt(slot, input);
  if (n_positions == 0 || n_tokens <= n_positions) return everything;
  if (hitters_.n_sampled(slot) < kLeastSampled) return everything;
  int32_t* positions = positions_ + shape_.slots[slot].index * max_positions_;
  MemorySet set = hitters_.peek(slot, input, options_.forced(n_positions), n_positions, positions);
  set.synthetic = landmarks_.summarise(slot, input, set);
  return set;
}

}  // namespace edgeh2o
