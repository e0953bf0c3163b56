#include "sparse/headwise_policy.h"

#include <algorithm>

#include "base/check.h"
#include "sparse/policy_registry.h"

namespace edgeh2o {
namespace {

// Pages of 16 lose twice as much with as many positions.
constexpr size_t kDecodePageSize = 4;
// Last queries of a prompt by which heads are judged that have a budget in decode alone.
constexpr size_t kSampledQueries = 64;

const PolicyRegistration kRegistration(
    "headwise", {"budgets"}, [](PolicyOptions& settings) -> std::shared_ptr<SparsePolicy> {
      HeadwiseOptions options;
      const auto budgets = [](const PolicyOptions::Counts& counts) {
        std::vector<size_t> result;
        for (const auto& count : counts) result.push_back(count.value_or(HeadwiseOptions::kFull));
        return result;
      };
      options.budgets = budgets(settings.counts("budgets"));
      options.decode_budgets = budgets(settings.counts("decode_budgets", PolicyOptions::Counts{}));
      options.by_query_head = settings.flag("by_query_head", options.by_query_head);
      options.n_local = settings.count("local", options.n_local);
      options.n_sinks = settings.count("sinks", options.n_sinks);
      options.decay = settings.number("decay", options.decay);
      options.page_size = settings.count("page_size", options.page_size);
      options.max_past = settings.count("max_past", options.max_past);
      options.n_tail = settings.count("tail", options.n_tail);
      options.decode_from = settings.count("decode_from", options.decode_from);
      options.decode_pages = settings.count("decode_pages", options.decode_pages);
      return std::make_shared<HeadwisePolicy>(options);
    });

}  // namespace

HeadwisePolicy::HeadwisePolicy(const HeadwiseOptions& options)
    : options_(options),
      hitters_({/*is_mean=*/true, options.decay}),
      landmarks_(options.page_size, options.max_past),
      recall_(options.max_past),
      pages_(kDecodePageSize, options.decode_pages, 2 * options.decode_pages) {
  check_budgets(options.budgets);
  if (!options.decode_budgets.empty()) {
    check_budgets(options.decode_budgets);
    EH2O_CHECK(options.decode_budgets.size() == options.budgets.size(), options.decode_budgets.size(),
               " decode_budgets for ", options.budgets.size(), " budgets");
    for (size_t i = 0; i < options.budgets.size(); ++i) {
      EH2O_CHECK(options.decode_budgets[i] <= options.budgets[i],
                 "a head cannot have more for generated tokens than for the prompt: budget ", i);
    }
  }
  EH2O_CHECK(!options.by_query_head || options.decode_from == SIZE_MAX,
             "generated tokens read by KV heads: by_query_head does not go with decode_from");
  EH2O_CHECK(options.decay >= 0.0f && options.decay <= 1.0f, "decay = ", options.decay, " is not in [0, 1]");
}

void HeadwisePolicy::check_budgets(const std::vector<size_t>& budgets) const {
  EH2O_CHECK(!budgets.empty(), "headwise needs a budget for every layer and head, got none");
  for (const size_t budget : budgets) EH2O_CHECK(budget > 0, "a budget is 0; it must be at least 1");
}

void HeadwisePolicy::set_budgets(const std::vector<size_t>& budgets) {
  check_budgets(budgets);
  EH2O_CHECK(options_.decode_budgets.empty(), "budgets cannot change where generated tokens have their own");
  EH2O_CHECK(budgets.size() == options_.budgets.size(), budgets.size(), " budgets for ",
             options_.budgets.size(), " heads");
  for (size_t slot = 0; slot < budgets.size(); ++slot) {
    const bool is_full = budgets[slot] == HeadwiseOptions::kFull;
    const bool was_full = options_.budgets[slot] == HeadwiseOptions::kFull;
    EH2O_CHECK(was_full || !is_full || !recall_.is_needed(shape()), "a head cannot get the whole past of ",
               shape().max_context, " positions, of which only ", options_.max_past, " are read, any more");
    hitters_.set_capacity(slot, is_full ? 0 : std::min(budgets[slot], shape().max_context));
  }
  options_.budgets = budgets;
}

std::string HeadwisePolicy::describe() const {
  const auto n_full = std::count(options_.budgets.begin(), options_.budgets.end(), HeadwiseOptions::kFull);
  return "headwise, " + std::to_string(options_.budgets.size()) + " budgets" +
         (options_.by_query_head ? " of query heads, " : ", ") + std::to_string(n_full) +
         " of them the whole past" + (options_.decode_budgets.empty() ? "" : ", others in decode") +
         ", local " + std::to_string(options_.n_local) + ", sinks " + std::to_string(options_.n_sinks) +
         ", landmarks of " + std::to_string(options_.page_size);
}

std::vector<size_t> HeadwisePolicy::capacities(const PolicyShape& shape) const {
  EH2O_CHECK(options_.budgets.size() == shape.n_slots(), options_.budgets.size(), " budgets do not fit ",
             shape.n_layers(), " layers with ", shape.n_slots(),
             options_.by_query_head ? " query heads" : " KV heads");
  std::vector<size_t> result = options_.budgets;
  for (size_t& capacity : result) {
    capacity = capacity == HeadwiseOptions::kFull ? 0 : std::min(capacity, shape.max_context);
  }
  return result;
}

std::vector<bool> HeadwisePolicy::recalls(const PolicyShape& shape) const {
  std::vector<bool> result;
  for (const size_t budget : options_.budgets) {
    result.push_back(budget == HeadwiseOptions::kFull && recall_.is_needed(shape));
  }
  return result;
}

// Where every head reads its whole past, nothing is known of them, and generated tokens read it too.
bool HeadwisePolicy::ends_prompts(const PolicyShape& shape) const {
  const std::vector<size_t>& budgets = decode_budgets();
  const auto has_budget = [](size_t budget) { return budget != HeadwiseOptions::kFull; };
  return options_.decode_from <= shape.max_context && std::any_of(budgets.begin(), budgets.end(), has_budget);
}

bool HeadwisePolicy::has_pages(const PolicyShape& shape) const {
  return options_.decode_pages > 0 && ends_prompts(shape) &&
         shape.max_context >= 2 * options_.decode_pages * kDecodePageSize;
}

PolicyNeeds HeadwisePolicy::needs(const PolicyShape& shape) const {
  const std::vector<size_t> all = capacities(shape);
  const std::vector<bool> recall = recalls(shape);
  PolicyNeeds needs;
  needs.n_dense_tail = options_.n_tail;
  needs.max_scored_memory = *std::max_element(all.begin(), all.end());
  if (needs.max_scored_memory > 0) needs.column_sums = ColumnSums::kJoint;
  needs.ends_prompts = ends_prompts(shape);
  for (size_t slot = 0; slot < all.size(); ++slot) {
    if (is_sampled(shape, slot)) needs.n_sampled_queries = kSampledQueries;
  }
  if (std::find(recall.begin(), recall.end(), true) != recall.end()) {
    needs.max_scored_pages = recall_.max_pages(shape);
  }
  needs.reads_all = needs.max_scored_memory + needs.max_scored_pages == 0;
  if (!needs.reads_all) needs.max_synthetic = landmarks_.max_rows(shape);
  needs.looks_at_past = needs.max_scored_pages > 0;  // landmarks are means, which a device makes
  return needs;
}

void HeadwisePolicy::take_buffers(Arena& arena, const PolicyShape& shape) {
  const std::vector<size_t> all = capacities(shape);
  const std::vector<bool> recall = recalls(shape);
  std::vector<size_t> scored = all;
  std::vector<bool> has_landmarks;
  has_pages_.clear();
  for (size_t i = 0; i < all.size(); ++i) {
    if (is_sampled(shape, i)) scored[i] = std::min(decode_budget(i), shape.max_context);
    has_landmarks.push_back(scored[i] > 0 || recall[i]);
    has_pages_.push_back(scored[i] == 0 && has_pages(shape));
  }
  full_memory_ = arena.take<MemorySet>(shape.n_slots());
  hitters_.take_buffers(arena, shape, scored);
  landmarks_.take_buffers(arena, shape, has_landmarks);
  recall_.take_buffers(arena, shape, recall);
  pages_.take_buffers(arena, shape, has_pages_);
  max_prompt_positions_ = 0;
  for (size_t i = 0; i < all.size(); ++i) {
    max_prompt_positions_ = std::max(max_prompt_positions_, prompt_positions(shape, i));
  }
  prompt_memory_ = arena.take<int32_t>(shape.max_layer_slots * max_prompt_positions_);
}

size_t HeadwisePolicy::state_bytes(const PolicyShape& shape) const {
  Arena arena;
  HeadwisePolicy(options_).take_buffers(arena, shape);
  return arena.used();
}

void HeadwisePolicy::allocate(const PolicyShape& shape) {
  arena_ = Arena::of([&](Arena& arena) { take_buffers(arena, shape); });
}

void HeadwisePolicy::begin_prompt() {
  std::fill_n(full_memory_, shape().n_slots(), MemorySet{});
  hitters_.begin_prompt();
  recall_.begin_prompt();
  landmarks_.begin_prompt();
  pages_.begin_prompt();
}

void HeadwisePolicy::observe_sample(size_t slot, size_t n_queries, Span<const float> sums) {
  hitters_.observe_sample(slot, n_queries, kSampledQueries, sums);
}

MemorySet HeadwisePolicy::select_memory(size_t slot, const SelectionInput& input) {
  if (!is_scored(slot)) {
    const size_t n_past = input.chunk.begin;
    MemorySet set = MemorySet::all_of({0, n_past});
    if (recall_.is_needed(n_past)) {
      set = recall_.select(slot, input, options_.n_sinks, options_.n_local);
      set.synthetic = landmarks_.summarise(slot, input, set);
    }
    return full_memory_[slot] = set;
  }
  const size_t budget = std::min(options_.budgets[slot], shape().max_context);
  MemorySet set = hitters_.select(slot, input, forced(budget));
  set.synthetic = landmarks_.summarise(slot, input, set);
  return set;
}

HeavyHitters::Forced HeadwisePolicy::forced(size_t capacity) const {
  return {std::min(options_.n_sinks, capacity / 4), std::min(options_.n_local, capacity / 2)};
}

// A memory set and the last chunk: of heads with the same budget for prompts, all that have scores.
size_t HeadwisePolicy::prompt_positions(const PolicyShape& shape, size_t slot) const {
  const size_t budget = decode_budget(slot);
  if (options_.decode_from > shape.max_context || budget == HeadwiseOptions::kFull) return 0;
  return std::min(std::min(budget, shape.max_context) + shape.chunk_size, shape.max_context);
}

size_t HeadwisePolicy::prompt_rows(const PolicyShape& shape, size_t slot) const {
  const size_t n_positions = prompt_positions(shape, slot);
  return n_positions > 0 ? n_positions + landmarks_.max_rows(shape) : 0;
}

MemorySet HeadwisePolicy::end_prompt(size_t slot, const SelectionInput& input) {
  if (chooses_pages(slot)) pages_.end_prompt(slot, input);
  const size_t n_tokens = input.chunk.begin, capacity = prompt_positions(shape(), slot);
  if (capacity == 0 || n_tokens < options_.decode_from || n_tokens <= capacity) {
    return MemorySet::all_of({0, n_tokens});
  }
  int32_t* positions = prompt_memory_ + shape().slots[slot].index * max_prompt_positions_;
  MemorySet set = hitters_.peek(slot, input, forced(capacity), capacity, positions);
  set.synthetic = landmarks_.summarise(slot, input, set);
  return set;
}

MemorySet HeadwisePolicy::select_decode(size_t slot, const SelectionInput& input) {
  return chooses_pages(slot) ? pages_.select_decode(slot, input) : MemorySet::all_of({0, input.chunk.begin});
}

MemorySet HeadwisePolicy::memory(size_t slot) const {
  return is_scored(slot) ? hitters_.memory(slot) : full_memory_[slot];
}

std::vector<float> HeadwisePolicy::scores(size_t slot) const {
  return is_scored(slot) ? hitters_.scores(slot) : std::vector<float>{};
}

}  // namespace edgeh2o
