// The guard: what the attention of a prefill is wrong by, and what is read again for it.
#include <algorithm>

#include "sequence/sequence.h"

namespace edgeh2o {
namespace {

// The part of the memory sets that a call may read twice.
constexpr size_t kMaxRepeats = 2;

AttentionError sum_of(const std::vector<AttentionError>& errors) {
  AttentionError sum;
  for (const AttentionError& error : errors) sum += error;
  return sum;
}

}  // namespace

uint64_t Sequence::attend_guarded(size_t layer, MatView<const float> q, PromptEnd end, uint8_t* scratch,
                                  size_t n_threads, MatView<float> out) {
  const AttentionPlan& plan = this->plan(layer);
  const LayerKv& kv = this->layer(layer).rows();
  const size_t first = this->layer(layer).n_tokens() - q.rows, everything = first + q.rows;
  const std::vector<SetReads>& reads = layers_[layer].reads;
  const auto run = [&](size_t window, const SetReads* reads) {
    return attention(layer, scratch, n_threads, window > 0).run(q, kv, first, window, end, out, reads);
  };
  const auto is_all = [](SetReads reads) { return reads == SetReads::kAll; };
  if (reads_densely_at_once() || has_dense_sets(layer)) {
    count_dense_read(layer);
    return run(everything, nullptr);
  }
  uint64_t n_pairs = run(0, reads.data());
  errors_.assign(reads.size(), {});
  const SampledRows rows = sampled_rows(layer, first, q.rows, end);
  ErrorSample sample(plan, scratch, n_threads);
  sample.measure(q, kv, first, {out.data, out.rows, out.cols, out.stride}, rows, errors_.data());
  if (plan.sizes.integers.are_bytes() && exceeds(layer, sum_of(errors_))) {
    sample.subtract_rounding(q, kv, first, rows, errors_.data());
  }
  choose_again(layer);
  if (std::all_of(again_.begin(), again_.end(), is_all)) {
    n_pairs += run(everything, nullptr);
  } else if (std::any_of(again_.begin(), again_.end(), is_all)) {
    n_pairs += run(0, again_.data());
  }
  return n_pairs;
}

bool Sequence::reads_densely_at_once() const {
  return n_repeats_ >= std::max<size_t>(1, n_all_sets_ / kMaxRepeats);
}

SampledRows Sequence::sampled_rows(size_t layer, size_t first, size_t n, PromptEnd end) const {
  const AttentionPlan& plan = this->plan(layer);
  const size_t n_dense = end == PromptEnd::kLater ? 0 : plan.needs.n_dense_tail;
  return {plan, n, first, n_dense, ceil_div(shape_.guard.n_rows * n, shape_.batch_size), layer};
}

// By errors_: the fewest sets without which the layer's error is within its limit.
void Sequence::choose_again(size_t layer) {
  Layer& state = layers_[layer];
  again_.assign(errors_.size(), SetReads::kNone);
  n_dense_reads_ += static_cast<size_t>(std::count(state.reads.begin(), state.reads.end(), SetReads::kAll));
  AttentionError left = sum_of(errors_);
  for (; exceeds(layer, left); left = sum_of(errors_)) {
    const auto worst = std::max_element(errors_.begin(), errors_.end(), [](const auto& a, const auto& b) {
      return a.difference < b.difference;
    });
    const auto set = static_cast<size_t>(worst - errors_.begin());
    worst->difference = 0.0;
    again_[set] = state.reads[set] = SetReads::kAll;
    let_decode_read_all(state, set, true);
    ++n_repeats_;
    ++n_dense_reads_;
  }
  state.error += left;
}

bool Sequence::take_error(size_t layer, AttentionError error) {
  const bool is_too_large = exceeds(layer, error);
  if (is_too_large) {
    error.difference = 0.0;
    n_repeats_ += n_sets(layer);
    count_dense_read(layer);
  }
  layers_[layer].error += error;
  return is_too_large;
}

void Sequence::count_dense_read(size_t layer) {
  n_dense_reads_ += n_sets(layer);
  for (size_t set = 0; set < n_sets(layer); ++set) let_decode_read_all(layers_[layer], set, true);
}

}  // namespace edgeh2o
