// The rule of ruvllm_sparse_attention: by distance alone. Query i reads a window before it, the first tokens,
// tokens at distances 1, 2, 4, ..., and landmarks: the mean key and mean value of blocks of tokens, of the
// last two complete blocks and of those 1, 2, 4, ... blocks before the last. A landmark weighs as much as one
// token, and is read even if its tokens are. Chunks of one token are the rule as it is defined; a longer one
// reads what its first token would, and itself.
#include <algorithm>
#include <memory>
#include <vector>

#include "base/arena.h"
#include "base/check.h"
#include "sparse/policy_registry.h"

namespace edgeh2o {
namespace {

struct RuvllmOptions {
  size_t window = 128;     // positions before the query, its own not counted
  size_t block_size = 64;  // positions of a landmark
  size_t n_globals = 1;    // first positions, which all queries read
  bool has_strides = true;
  bool has_landmarks = true;
  bool is_in_decode = true;  // else generated tokens read everything
};

class RuvllmPolicy final : public SparsePolicy {
 public:
  explicit RuvllmPolicy(const RuvllmOptions& options) : options_(options) {}

  std::string describe() const override {
    return "ruvllm, window " + std::to_string(options_.window) + ", blocks of " +
           std::to_string(options_.block_size) + ", " + std::to_string(options_.n_globals) + " globals";
  }
  PolicyNeeds needs(const PolicyShape& shape) const override {
    PolicyNeeds needs;
    needs.max_synthetic = needs.max_decode_synthetic = max_landmarks(shape);
    needs.looks_at_past = options_.has_landmarks;
    return needs;
  }
  size_t state_bytes(const PolicyShape& shape) const override {
    Arena arena;
    RuvllmPolicy(options_).take_buffers(arena, shape);
    return arena.used();
  }
  size_t resident_bytes() const override { return arena_.resident_bytes(); }
  void begin_prompt() override {
    for (size_t i = 0; i < shape().n_slots(); ++i) slots_[i].n_blocks = slots_[i].n_memory = 0;
  }
  bool is_scored(size_t) const override { return false; }
  bool chooses_in_decode() const override { return options_.is_in_decode; }
  // Means are made again from the cached rows.
  bool can_be_saved() const override { return true; }
  void save(size_t, ByteWriter&) const override {}
  void load(size_t, ByteReader&) override {}
  MemorySet memory(size_t slot) const override {
    return MemorySet::list(slots_[slot].memory, slots_[slot].n_memory);
  }

 protected:
  MemorySet select_memory(size_t slot, const SelectionInput& input) override {
    slots_[slot].n_memory = list_tokens(input.chunk.begin, slots_[slot].memory);
    MemorySet set = memory(slot);
    set.synthetic = list_landmarks(slot, input);
    return set;
  }
  MemorySet select_decode(size_t slot, const SelectionInput& input) override {
    int32_t* tokens = decode_tokens_ + shape().slots[slot].index * max_tokens(shape());
    MemorySet set = MemorySet::list(tokens, list_tokens(input.chunk.begin, tokens));
    set.synthetic = list_landmarks(slot, input);
    return set;
  }
  void allocate(const PolicyShape& shape) override {
    arena_ = Arena::of([&](Arena& arena) { take_buffers(arena, shape); });
  }

 private:
  struct Slot {
    int32_t* memory = nullptr;  // [max_tokens] of the latest chunk
    float* means = nullptr;     // [max_blocks][key_dim + value_dim]
    size_t n_memory = 0, n_blocks = 0;
  };

  size_t max_tokens(const PolicyShape& shape) const {
    return std::min(shape.max_context, options_.window + options_.n_globals + 8 * sizeof(size_t));
  }
  size_t max_blocks(const PolicyShape& shape) const {
    return options_.has_landmarks ? shape.max_context / options_.block_size : 0;
  }
  size_t max_landmarks(const PolicyShape& shape) const {
    return std::min(max_blocks(shape), 2 + 8 * sizeof(size_t));
  }

  void take_buffers(Arena& arena, const PolicyShape& shape) {
    const size_t n_rows = shape.max_layer_slots * max_landmarks(shape);
    slots_ = arena.take<Slot>(shape.n_slots());
    for (size_t i = 0; i < shape.n_slots(); ++i) {
      Slot slot;
      slot.memory = arena.take<int32_t>(max_tokens(shape));
      slot.means = arena.take<float>(max_blocks(shape) * (shape.slots[i].key_dim + shape.slots[i].value_dim));
      if (slots_) slots_[i] = slot;
    }
    decode_tokens_ = arena.take<int32_t>(shape.max_layer_slots * max_tokens(shape));
    k_ = arena.take<float>(n_rows * shape.max_key_dim);
    v_ = arena.take<float>(n_rows * shape.max_value_dim);
    biases_ = arena.take<float>(max_landmarks(shape));
    if (biases_) std::fill_n(biases_, max_landmarks(shape), 0.0f);
  }

  // Ascending, what query i reads of the tokens before it.
  size_t list_tokens(size_t i, int32_t* out) const {
    const size_t window_begin = i - std::min(i, options_.window),
                 n_globals = std::min(options_.n_globals, window_begin);
    int32_t* next = out;
    for (size_t token = 0; token < n_globals; ++token) *next++ = static_cast<int32_t>(token);
    if (options_.has_strides) {
      size_t distance = 1;
      while (distance <= i / 2) distance *= 2;
      for (; distance > 0 && i > 0; distance /= 2) {
        if (i - distance >= n_globals && i - distance < window_begin) {
          *next++ = static_cast<int32_t>(i - distance);
        }
      }
    }
    for (size_t token = window_begin; token < i; ++token) *next++ = static_cast<int32_t>(token);
    return static_cast<size_t>(next - out);
  }

  SyntheticRows list_landmarks(size_t slot, const SelectionInput& input) {
    const SlotShape& head = shape().slots[slot];
    const size_t i = input.chunk.begin,
                 n_complete = options_.has_landmarks ? (i + 1) / options_.block_size : 0;
    if (n_complete == 0) return {};
    update_means(slot, input, n_complete);
    const size_t most = max_landmarks(shape());
    float *k = k_ + head.index * most * shape().max_key_dim,
          *v = v_ + head.index * most * shape().max_value_dim;
    size_t count = 0;
    const auto append = [&](size_t block) {
      const float* mean = slots_[slot].means + block * (head.key_dim + head.value_dim);
      std::copy_n(mean, head.key_dim, k + count * head.key_dim);
      std::copy_n(mean + head.key_dim, head.value_dim, v + count * head.value_dim);
      ++count;
    };
    const size_t last = n_complete - 1;
    append(last);
    if (last >= 1) append(last - 1);
    for (size_t distance = 2; options_.has_strides && distance <= last; distance *= 2)
      append(last - distance);
    return {k, v, biases_, count};
  }

  // Drafts may have ended a block with tokens that were not accepted: one that does not lie before the query
  // is made anew.
  void update_means(size_t slot_idx, const SelectionInput& input, size_t n_complete) {
    Slot& slot = slots_[slot_idx];
    const size_t key_dim = shape().slots[slot_idx].key_dim, value_dim = shape().slots[slot_idx].value_dim;
    slot.n_blocks = std::min(slot.n_blocks, input.chunk.begin / options_.block_size);
    const float share = 1.0f / static_cast<float>(options_.block_size);
    for (; slot.n_blocks < n_complete; ++slot.n_blocks) {
      const size_t first = slot.n_blocks * options_.block_size;
      float* mean = slot.means + slot.n_blocks * (key_dim + value_dim);
      std::fill_n(mean, key_dim + value_dim, 0.0f);
      input.add_kv_rows(input.past_keys.type, mean, input.past_keys.row(first), nullptr, options_.block_size,
                        key_dim);
      input.add_kv_rows(input.past_values.type, mean + key_dim, input.past_values.row(first), nullptr,
                        options_.block_size, value_dim);
      for (size_t d = 0; d < key_dim + value_dim; ++d) mean[d] *= share;
    }
  }

  RuvllmOptions options_;
  Arena arena_;
  Slot* slots_ = nullptr;              // [n_slots]
  int32_t* decode_tokens_ = nullptr;   // [max_layer_slots][max_tokens]
  float *k_ = nullptr, *v_ = nullptr;  // [max_layer_slots][max_landmarks][max_key_dim], [...][max_value_dim]
  float* biases_ = nullptr;            // [max_landmarks] zeros
};

const PolicyRegistration kRuvllmRegistration(
    "ruvllm", {}, [](PolicyOptions& settings) -> std::shared_ptr<SparsePolicy> {
      RuvllmOptions options;
      options.window = settings.count("window", options.window);
      options.block_size = settings.count("block_size", options.block_size);
      options.n_globals = settings.count("globals", options.n_globals);
      options.has_strides = settings.flag("strides", options.has_strides);
      options.has_landmarks = settings.flag("landmarks", options.has_landmarks);
      options.is_in_decode = settings.flag("in_decode", options.is_in_decode);
      EH2O_CHECK(options.block_size > 0, "block_size must be at least 1");
      return std::make_shared<RuvllmPolicy>(options);
    });

}  // namespace
}  // namespace edgeh2o
