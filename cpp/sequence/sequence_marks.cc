// Going back, marks to go back to, copies, and states that are saved.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "base/check.h"
#include "sequence/sequence.h"

namespace edgeh2o {
namespace {

// What marks of recurrent states may take: those of a delta net are as large as the rows of 1,500 tokens.
constexpr size_t kMarkBytes = size_t{64} << 20, kLeastMarks = 3;

}  // namespace

void Sequence::rewind_layers(size_t position) {
  ahead_.clear();
  for_each_state([&](LayerState& state) { state.rewind(position); });
  for (Layer& layer : layers_) {
    if (layer.received) layer.received->rewind(position);
  }
  if (position == 0) n_evicted_ = 0;
  tokens_.resize(std::min(tokens_.size(), position + n_evicted_));
}

// 0: by the policy; 1: all by generated tokens; 2: by the rest of the prompt.
void Sequence::read_as(Layer& layer, size_t set, unsigned number) const {
  layer.reads[set] = number == 2 ? SetReads::kAll : SetReads::kByPolicy;
  let_decode_read_all(layer, set, number > 0);
}

void Sequence::reset() {
  policy_->begin_prompt();
  rewind_layers(0);
  marks_.clear();
  end_prefill(0);
  n_pairs_ = n_pairs_dense_ = 0;
  for (Layer& layer : layers_) {
    layer.error = {};
    layer.prompt.keep_copied(0);
    for (size_t set = 0; set < layer.reads.size(); ++set) read_as(layer, set, 0);
  }
  n_dense_reads_ = 0;
  n_repeats_ = 0;
  is_broken_ = false;
}

bool Sequence::mark() {
  check_whole();
  if (!policy_->can_be_saved() || n_evicted_ > 0) return false;
  const size_t now = position();
  if (marks_.empty() || marks_.back().position < now) {
    marks_.push_back({now, save_state()});
    if (is_recurrent()) drop_marks();
  }
  return true;
}

void Sequence::drop_marks() {
  while (marks_.size() > std::max<size_t>(kLeastMarks, kMarkBytes / marks_.back().state.size())) {
    size_t dropped = 0, least = SIZE_MAX;
    for (size_t i = 0; i + 1 < marks_.size(); ++i) {
      const size_t gap = marks_[i + 1].position - (i == 0 ? 0 : marks_[i - 1].position);
      if (gap < least) dropped = i, least = gap;
    }
    marks_.erase(marks_.begin() + static_cast<ptrdiff_t>(dropped));
  }
}

bool Sequence::can_rewind_to(size_t position) const {
  return !is_broken_ && prefill_end_ <= position && (!is_recurrent() || position == this->position());
}

size_t Sequence::find_mark(size_t position) const {
  const size_t nearest = std::min(position, this->position());
  if (can_rewind_to(nearest)) return nearest;
  size_t found = 0;
  for (const Mark& mark : marks_) {
    if (mark.position <= position) found = mark.position;
  }
  return found;
}

void Sequence::rewind(size_t position) {
  EH2O_CHECK(position <= this->position(), "cannot go back to position ", position, ": the tokens end at ",
             this->position());
  if (can_rewind_to(position)) {
    rewind_layers(position);
    policy_->rewind(position);
    for (Layer& layer : layers_) layer.prompt.keep_copied(std::min(layer.prompt.n_copied(), position));
    while (!marks_.empty() && marks_.back().position > position) marks_.pop_back();
    return;
  }
  if (position == 0) return reset();
  const auto found = std::find_if(marks_.begin(), marks_.end(),
                                  [position](const Mark& mark) { return mark.position == position; });
  EH2O_CHECK(found != marks_.end(), "cannot go back to position ", position, ": the prompt ends at ",
             prefill_end_, " and nothing is noted of the state there");
  std::vector<Mark> marks(std::make_move_iterator(marks_.begin()), std::make_move_iterator(found + 1));
  std::vector<int32_t> tokens = std::move(tokens_);
  std::vector<size_t> n_copied;  // the rows before stay as they are
  for (const Layer& layer : layers_) n_copied.push_back(std::min(layer.prompt.n_copied(), position));
  load_state({marks.back().state.data(), marks.back().state.size()});
  tokens.resize(std::min(tokens.size(), position));
  tokens_ = std::move(tokens);
  marks_ = std::move(marks);
  for (size_t i = 0; i < layers_.size(); ++i) layers_[i].prompt.keep_copied(n_copied[i]);
}

size_t Sequence::mark_bytes() const {
  return std::accumulate(marks_.begin(), marks_.end(), size_t{0},
                         [](size_t sum, const Mark& mark) { return sum + mark.state.size(); });
}

std::vector<size_t> Sequence::marks() const {
  std::vector<size_t> positions;
  for (const Mark& mark : marks_) positions.push_back(mark.position);
  return positions;
}

void Sequence::copy_from(const Sequence& other, size_t position) {
  EH2O_CHECK(this != &other, "a sequence cannot be copied to itself");
  const auto found = std::find_if(other.marks_.begin(), other.marks_.end(),
                                  [position](const Mark& mark) { return mark.position == position; });
  EH2O_CHECK(found != other.marks_.end(), "nothing is noted of the state at position ", position);
  EH2O_CHECK(layers_.size() == other.layers_.size() && policy_->describe() == other.policy_->describe(),
             "the other sequence is of another model or policy");
  EH2O_CHECK(shape_.adapter_scales == other.shape_.adapter_scales,
             "the other sequence was read with other adapters");
  load_state({found->state.data(), found->state.size()});
  const auto copy_rows = [position](const KvRows& to, const KvRows& from) {
    const auto n_bytes = static_cast<size_t>(to.row(position) - to.row(0));
    EH2O_CHECK(to.type == from.type && to.head_dim == from.head_dim, "the rows of the caches differ");
    std::memcpy(to.row(0), from.row(0), n_bytes);
  };
  try {
    for (size_t i = 0; i < layers_.size(); ++i) {
      EH2O_CHECK(attends(i) == other.attends(i), "layer ", i, " is of another kind");
      if (!has_own_rows(i)) continue;
      const LayerKv &to = layer(i).rows(), &from = other.layer(i).rows();
      EH2O_CHECK(layer(i).n_kv_heads() == other.layer(i).n_kv_heads(), "layer ", i, " has other KV heads");
      for (size_t head = 0; head < layer(i).n_kv_heads(); ++head) {
        copy_rows(to.k(head), from.k(head));
        if (!layer(i).values_are_keys()) copy_rows(to.v(head), from.v(head));
      }
      EH2O_CHECK(layer(i).has_index() == other.layer(i).has_index(), "layer ", i, " has another indexer");
      if (layer(i).has_index()) copy_rows(layer(i).index_rows(), other.layer(i).index_rows());
    }
  } catch (...) {
    reset();
    throw;
  }
  const Span<const int32_t> tokens = other.tokens();
  tokens_.assign(tokens.data, tokens.data + position);
  marks_.assign(other.marks_.begin(), found + 1);
}

std::vector<uint8_t> Sequence::save_state() const {
  EH2O_CHECK(!is_broken_, "the last call was interrupted: there is no state to save");
  EH2O_CHECK(n_evicted_ == 0, n_evicted_,
             " of its tokens were evicted from the cache (--context-full evict)");
  settle();
  ByteWriter out;
  out.put<uint64_t>(position());
  out.put<uint64_t>(prefill_end_);
  out.put<uint64_t>(n_pairs_dense_);
  out.put<uint64_t>(n_pairs_);
  for (const Layer& layer : layers_) {
    if (layer.own) layer.own->save(out);
    if (layer.recurrent) layer.recurrent->save(out);
    for (size_t set = 0; set < layer.reads.size(); ++set) {
      const bool is_all = needs_.ends_by_scores && layer.prompt.reads_all(set);
      out.put<uint8_t>(layer.reads[set] == SetReads::kAll ? 2 : is_all);
    }
  }
  policy_->save(position(), out);
  return out.bytes();
}

void Sequence::load_state(Span<const uint8_t> state) {
  reset();
  ByteReader in(state);
  try {
    const size_t position = in.take_at_most<uint64_t>(shape_.max_context, "the number of tokens");
    end_prefill(in.take_at_most<uint64_t>(position, "the end of the prompt"));
    n_pairs_dense_ = in.take<uint64_t>();
    n_pairs_ = in.take<uint64_t>();
    for (Layer& layer : layers_) {
      if (layer.own) layer.own->load(position, in);
      if (layer.recurrent) layer.recurrent->load(position, in);
      for (size_t set = 0; set < layer.reads.size(); ++set) {
        read_as(layer, set, in.take_at_most<uint8_t>(2, "whether a head reads all"));
      }
    }
    policy_->load(position, in);
    in.check_end();
  } catch (...) {
    reset();
    throw;
  }
}

std::vector<Span<const uint8_t>> Sequence::mark_states() const {
  std::vector<Span<const uint8_t>> states;
  for (const Mark& mark : marks_) states.push_back({mark.state.data(), mark.state.size()});
  return states;
}

void Sequence::load_states(Span<const uint8_t> state, const std::vector<Span<const uint8_t>>& marks) {
  std::vector<Mark> loaded;
  // Each is taken up, by which it is checked, so that none fails when the prompt goes back to it.
  const auto load = [&](Span<const uint8_t> bytes, size_t least) {
    load_state(bytes);
    if (position() >= least) return;
    const size_t position = this->position();
    reset();
    throw_invalid("the mark at position ", position, " is out of order");
  };
  for (const Span<const uint8_t>& mark : marks) {
    load(mark, loaded.empty() ? 0 : loaded.back().position + 1);
    loaded.push_back({position(), {mark.data, mark.data + mark.size}});
  }
  load(state, loaded.empty() ? 0 : loaded.back().position);
  marks_ = std::move(loaded);
}

}  // namespace edgeh2o
