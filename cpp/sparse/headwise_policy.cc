#include "sparse/headwise_policy.h"

#include <algorithm>

#include "base/check.h"
#include "sparse/policy_registry.h"

namespace edgeh2o {
namespace {

const PolicyRegistration kHeadwiseRegistration(
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
      options.spread = settings.number("spread", options.spread);
      options.max_past = settings.count("max_past", options.max_past);
      options.n_tail = settings.count("tail", options.n_tail);
      options.decode_from = settings.count("decode_from", options.decode_from);
      options.decode_until = settings.count("decode_until", options.decode_until);
      options.decode_pages = settings.count("decode_pages", options.decode_pages);
      return std::make_shared<HeadwisePolicy>(options);
    });

}  // namespace

HeadwisePolicy::HeadwisePolicy(const HeadwiseOptions& options)
    : options_(options),
      hitters_({/*is_mean=*/true, options.decay}),
      sums_(options.page_size, options.max_past, options.spread > 0.0f),
      landmarks_(sums_, options.spread),
      recall_(options.max_past),
      decode_(options, sums_) {
  check_budgets(options.budgets);
  EH2O_CHECK(options.decay >= 0.0f && options.decay <= 1.0f, "decay = ", options.decay, " is not in [0, 1]");
  EH2O_CHECK(options.spread >= 0.0f && options.spread <= 1.0f, "spread = ", options.spread,
             " is not in [0, 1]");
}

void HeadwisePolicy::check_budgets(const std::vector<size_t>& budgets) const {
  EH2O_CHECK(!budgets.empty(), "headwise needs a budget for every layer and head, got none");
  for (const size_t budget : budgets) EH2O_CHECK(budget > 0, "a budget is 0; it must be at least 1");
}

void HeadwisePolicy::set_budgets(const std::vector<size_t>& budgets,
                                 const std::vector<size_t>& decode_budgets) {
  check_budgets(budgets);
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
  decode_.set_budgets(decode_budgets);
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

PolicyNeeds HeadwisePolicy::needs(const PolicyShape& shape) const {
  const std::vector<size_t> all = capacities(shape);
  const std::vector<bool> recall = recalls(shape);
  PolicyNeeds needs;
  needs.n_dense_tail = options_.n_tail;
  needs.max_scored_memory = *std::max_element(all.begin(), all.end());
  if (needs.max_scored_memory > 0) needs.column_sums = ColumnSums::kJoint;
  decode_.add_needs(shape.of_kv_heads(), needs);
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
  const PolicyShape kv_shape = shape.of_kv_heads();
  std::vector<bool> has_pages = decode_.landmark_slots(kv_shape);
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i] > 0 || recall[i]) has_pages[shape.slots[i].kv_slot] = true;
  }
  full_memory_ = arena.take<MemorySet>(shape.n_slots());
  hitters_.take_buffers(arena, shape, all);
  sums_.take_buffers(arena, kv_shape, has_pages);
  landmarks_.take_buffers(arena, shape);
  recall_.take_buffers(arena, shape, recall);
  decode_.take_buffers(arena, kv_shape);
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
  sums_.begin_prompt();
  decode_.begin_prompt();
}

void HeadwisePolicy::save(size_t, ByteWriter& out) const {
  hitters_.save(out);
  decode_.save(out);
}

void HeadwisePolicy::load(size_t n_tokens, ByteReader& in) {
  hitters_.load(n_tokens, in);
  decode_.load(n_tokens, in);
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
  MemorySet set = hitters_.select(slot, input, options_.forced(budget));
  set.synthetic = landmarks_.summarise(slot, input, set);
  return set;
}

MemorySet HeadwisePolicy::memory(size_t slot) const {
  return is_scored(slot) ? hitters_.memory(slot) : full_memory_[slot];
}

std::vector<float> HeadwisePolicy::scores(size_t slot) const {
  return is_scored(slot) ? hitters_.scores(slot) : std::vector<float>{};
}

}  // namespace edgeh2o
