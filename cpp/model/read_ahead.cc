#include "model/read_ahead.h"

#include <algorithm>

namespace edgeh2o {
namespace {

// Of experts that are asked for and not yet multiplied: two tokens' worth of gpt-oss, and a disk's queue
// full.
constexpr size_t kAheadBytes = size_t{64} << 20;

// The same before a layer begins, of which attention is the first half: as much as the least memory leaves
// to pages. So many rows go through each expert on the average.
constexpr size_t kLayerAheadBytes = size_t{192} << 20;
constexpr size_t kRowsOfExpert = 8;

}  // namespace

ReadAhead::ReadAhead(const MappedFile& file, size_t n_layers, bool is_beyond_memory)
    : file_(file), is_beyond_memory_(is_beyond_memory), layers_(n_layers + 1) {
  for (std::deque<Group>& groups : layers_) groups.emplace_back();
}

void ReadAhead::add_to(size_t layer, size_t group, const PackedMatrix& matrix) {
  std::deque<Group>& groups = layers_[layer];
  while (groups.size() <= group) groups.emplace_back();
  if (matrix && file_.holds(matrix.panel(0)))
    groups[group].pages.push_back({matrix.panel(0), matrix.n_bytes()});
}

size_t ReadAhead::expert_bytes(size_t layer, size_t expert) const {
  size_t sum = 0;
  for (const Span<const uint8_t>& each : layers_[layer][1 + expert].pages) sum += each.size;
  return sum;
}

void ReadAhead::experts(size_t layer, size_t n_rows) const {
  const size_t n_experts = layers_[layer].size() - 1;
  if (!is_beyond_memory_ || n_rows < kRowsOfExpert * n_experts) return;
  size_t n_bytes = 0;
  for (size_t e = 0; e < n_experts && n_bytes < kLayerAheadBytes; ++e) {
    expert(layer, e);
    n_bytes += expert_bytes(layer, e);
  }
}

void ReadAhead::ask(const Group& group) const {
  if (!is_beyond_memory_ && group.was_asked_for.exchange(true, std::memory_order_relaxed)) return;
  for (const Span<const uint8_t>& each : group.pages) file_.will_need(each.data, each.size);
}

void ExpertsAhead::before(size_t e) {
  if (!ahead_) return;
  if (next_ > 0) n_bytes_ -= ahead_->expert_bytes(layer_, at_hand_);
  at_hand_ = e;
  for (; next_ < routes_.n_experts && n_bytes_ < kAheadBytes; ++next_) {
    if (routes_.begin[next_] == routes_.begin[next_ + 1]) continue;
    ahead_->expert(layer_, next_);
    n_bytes_ += ahead_->expert_bytes(layer_, next_);
  }
}

}  // namespace edgeh2o
