// Quest (Tang et al. 2024, arXiv 2406.10774): prompts are read dense; a generated token reads the pages of
// the prompt whose bounds promise the largest logits, in all layers but the first ones, and all that was
// generated. The paper chooses per query head and among generated pages too; here the heads of a group read
// the same pages, by the largest bound of the group.
#include <algorithm>
#include <memory>
#include <vector>

#include "base/check.h"
#include "sparse/page_choice.h"
#include "sparse/policy_registry.h"

namespace edgeh2o {
namespace {

struct QuestOptions {
  size_t page_size = 16;
  size_t n_tokens = 2048;     // of the pages that a token reads
  size_t n_dense_layers = 2;  // the first ones, which read everything
};

class QuestPolicy final : public SparsePolicy {
 public:
  explicit QuestPolicy(const QuestOptions& options)
      : options_(options), pages_(options.page_size, n_pages(), n_pages() + 1) {}

  std::string describe() const override {
    return "quest, " + std::to_string(n_pages()) + " pages of " + std::to_string(options_.page_size) +
           ", from layer " + std::to_string(options_.n_dense_layers);
  }
  PolicyNeeds needs(const PolicyShape&) const override {
    PolicyNeeds needs;
    needs.reads_all = needs.ends_prompts = true;
    return needs;
  }
  size_t state_bytes(const PolicyShape& shape) const override {
    Arena arena;
    QuestPolicy(options_).take_buffers(arena, shape);
    return arena.used();
  }
  size_t resident_bytes() const override { return arena_.resident_bytes(); }
  void begin_prompt() override {
    std::fill_n(n_past_, shape().n_slots(), size_t{0});
    pages_.begin_prompt();
  }
  bool is_scored(size_t) const override { return false; }
  bool chooses_in_decode() const override { return true; }
  bool prepare_decode(size_t slot, const SelectionInput& input) override {
    return has_pages(slot) && pages_.prepare_decode(slot, input);
  }
  void score_decode(size_t slot, const SelectionInput& input, size_t part, size_t n_parts) override {
    if (has_pages(slot)) pages_.score_decode(slot, input, part, n_parts);
  }
  size_t choice_bytes(size_t slot) const override { return has_pages(slot) ? pages_.choice_bytes(slot) : 0; }
  MemorySet end_prompt(size_t slot, const SelectionInput& input) override {
    if (has_pages(slot)) pages_.end_prompt(slot, input);
    return MemorySet::all_of({0, input.chunk.begin});
  }
  // Bounds are made again from the cached rows.
  bool can_be_saved() const override { return true; }
  void save(size_t, ByteWriter&) const override {}
  void load(size_t, ByteReader&) override {}
  MemorySet memory(size_t slot) const override { return MemorySet::all_of({0, n_past_[slot]}); }

 protected:
  MemorySet select_memory(size_t slot, const SelectionInput& input) override {
    n_past_[slot] = input.chunk.begin;
    return memory(slot);
  }
  MemorySet select_decode(size_t slot, const SelectionInput& input) override {
    return has_pages(slot) ? pages_.select_decode(slot, input) : MemorySet::all_of({0, input.chunk.begin});
  }
  void allocate(const PolicyShape& shape) override {
    arena_ = Arena::of([&](Arena& arena) { take_buffers(arena, shape); });
  }

 private:
  size_t n_pages() const { return std::max<size_t>(1, options_.n_tokens / options_.page_size); }
  bool has_pages(size_t slot) const { return shape().slots[slot].layer >= options_.n_dense_layers; }
  void take_buffers(Arena& arena, const PolicyShape& shape) {
    std::vector<bool> has_pages;
    for (const SlotShape& slot : shape.slots) has_pages.push_back(slot.layer >= options_.n_dense_layers);
    n_past_ = arena.take<size_t>(shape.n_slots());
    pages_.take_buffers(arena, shape, has_pages);
  }

  QuestOptions options_;
  PageChoice pages_;
  Arena arena_;
  size_t* n_past_ = nullptr;  // [n_slots] of the latest chunk
};

const PolicyRegistration kQuestRegistration(
    "quest", {}, [](PolicyOptions& settings) -> std::shared_ptr<SparsePolicy> {
      QuestOptions options;
      options.page_size = settings.count("page_size", options.page_size);
      options.n_tokens = settings.count("tokens", options.n_tokens);
      options.n_dense_layers = settings.count("dense_layers", options.n_dense_layers);
      EH2O_CHECK(options.page_size > 0 && options.page_size <= options.n_tokens, "a page of ",
                 options.page_size, " positions does not fit into the ", options.n_tokens,
                 " that a generated token reads");
      return std::make_shared<QuestPolicy>(options);
    });

}  // namespace
}  // namespace edgeh2o
