#include "sequence/recurrent_state.h"

#include <algorithm>
#include <utility>

#include "ops/rows.h"

namespace edgeh2o {
namespace {

// The rows of `like` in what is noted, of which the first is row `begin`.
MatView<float> noted(float* data, size_t begin, MatView<const float> like) {
  return {data + begin * like.cols, like.rows, like.cols, like.cols};
}

}  // namespace

RecurrentState::RecurrentState(const Recurrence& recurrence, size_t most_ahead, Arena& arena)
    : recurrence_(recurrence), values_(arena.take<float>(recurrence.n_values())) {
  if (most_ahead < 2) return;
  ahead_ = arena.take<float>(recurrence.n_values());
  inputs_ = arena.take<float>(most_ahead * recurrence.conv_dim);
  history_ = arena.take<float>(most_ahead * recurrence.history_dim);
  if (recurrence.n_matrices() == 0) return;
  rows_ = arena.take<float>(most_ahead * recurrence.row_dim());
  rates_ = arena.take<float>(most_ahead * recurrence.n_gates());
  decays_ = arena.take<float>(most_ahead * recurrence.n_decays());
  steps_ = arena.take<float>(most_ahead * recurrence.scan.n_channels);
  bc_ = arena.take<float>(most_ahead * recurrence.scan.bc_dim());
  discarded_ = arena.take<float>(recurrence.out_dim());
}

size_t RecurrentState::ahead_bytes(const Recurrence& recurrence, size_t most_ahead) {
  Arena with, without;
  RecurrentState(recurrence, most_ahead, with);
  RecurrentState(recurrence, 0, without);
  return with.used() - without.used();
}

float* RecurrentState::values() {
  EH2O_CHECK(n_ahead_ == 0, "a recurrent state is asked for before it is settled");
  return values_;
}

StateStep RecurrentState::step(bool looks_ahead, size_t begin) {
  if (!looks_ahead) return {values(), values_};
  return {begin == 0 ? values() : ahead_, ahead_};
}

void RecurrentState::note_inputs(size_t begin, MatView<const float> inputs) {
  copy_rows(inputs, noted(inputs_, begin, inputs));
}

void RecurrentState::note_rows(size_t begin, MatView<const float> rows, MatView<const float> rates,
                               MatView<const float> decays) {
  copy_rows(rows, noted(rows_, begin, rows));
  copy_rows(rates, noted(rates_, begin, rates));
  copy_rows(decays, noted(decays_, begin, decays));
}

void RecurrentState::note_part(size_t begin, size_t column, MatView<const float> inputs) {
  const size_t stride = recurrence_.conv_dim;
  copy_rows(inputs, {inputs_ + begin * stride + column, inputs.rows, inputs.cols, stride});
}

void RecurrentState::note_history(size_t begin, MatView<const float> inputs) {
  copy_rows(inputs, noted(history_, begin, inputs));
}

void RecurrentState::note_changes(size_t begin, MatView<const float> rows) {
  copy_rows(rows, noted(rows_, begin, rows));
}

void RecurrentState::note_scan(size_t begin, MatView<const float> x, MatView<const float> steps,
                               MatView<const float> bc, const float* a) {
  copy_rows(x, noted(rows_, begin, x));
  copy_rows(steps, noted(steps_, begin, steps));
  copy_rows(bc, noted(bc_, begin, bc));
  a_ = a;
}

void RecurrentState::advance(size_t n_tokens) {
  if (n_ahead_ > 0) {
    EH2O_CHECK(n_tokens <= n_ahead_ - n_kept_, "a recurrent state that has looked at ", n_ahead_,
               " tokens cannot count ", n_kept_ + n_tokens);
    n_kept_ += n_tokens;
  }
  n_tokens_ += n_tokens;
}

void RecurrentState::look_ahead(size_t n_tokens) {
  n_ahead_ = n_kept_ = n_tokens;
  n_tokens_ += n_tokens;
}

void RecurrentState::settle(const KernelTable& table) {
  if (n_ahead_ == 0) return;
  const size_t n = n_kept_;
  if (n == n_ahead_) {
    std::swap(values_, ahead_);
  } else {
    const StateStep own{values_, values_};
    const auto kept = [n](float* data, size_t cols) { return MatView<const float>{data, n, cols, cols}; };
    const MatView<const float> rows = kept(rows_, recurrence_.row_dim()),
                               rates = kept(rates_, recurrence_.n_gates()),
                               decays = kept(decays_, recurrence_.n_decays());
    const MatView<float> out{discarded_, n, recurrence_.out_dim(), 0};  // one row for all tokens
    keep_inputs(kept(inputs_, recurrence_.conv_dim), recurrence_.n_conv_taps,
                own.at(recurrence_.n_matrices()));
    if (recurrence_.history_rows > 0) {
      keep_inputs(kept(history_, recurrence_.history_dim), recurrence_.history_rows + 1,
                  own.at(recurrence_.history_at()));
    }
    if (!recurrence_.delta.is_none()) {
      delta_net(table, recurrence_.delta, rows, rates, decays, own, out, nullptr);
    } else if (!recurrence_.ssd.is_none()) {
      ssd(table, recurrence_.ssd, rows, rates, decays, nullptr, own, out);
    } else if (!recurrence_.scan.is_none()) {
      const ScanSizes& scan = recurrence_.scan;
      selective_scan(table, scan, rows, kept(steps_, scan.n_channels), kept(bc_, scan.bc_dim()), a_, nullptr,
                     own, out);
    } else if (recurrence_.wkv.is_rwkv6()) {  // what reads the state does not count
      wkv6(table, recurrence_.wkv, rows, rows.data, rows.data, own, out);
    } else if (!recurrence_.wkv.is_none()) {
      wkv(table, recurrence_.wkv, rows, rows.data, own, out);
    }
  }
  n_ahead_ = n_kept_ = 0;
}

void RecurrentState::rewind(size_t n_tokens) {
  if (n_tokens == n_tokens_ && n_tokens > 0) return;
  if (n_tokens > 0 && n_tokens < n_tokens_ && n_tokens_ - n_tokens <= n_kept_) {
    n_kept_ -= n_tokens_ - n_tokens;
    n_tokens_ = n_tokens;
    return;
  }
  EH2O_CHECK(n_tokens == 0, "a recurrent state of ", n_tokens_, " tokens cannot go back to ", n_tokens);
  // Of no tokens too: an interrupted call leaves numbers behind before it counts its tokens.
  std::fill_n(values_, recurrence_.n_values(), 0.0f);
  n_tokens_ = n_ahead_ = n_kept_ = 0;
  ++n_replaced_;
}

void RecurrentState::save(ByteWriter& out) const { out.put_array(values_, recurrence_.n_values()); }

void RecurrentState::load(size_t n_tokens, ByteReader& in) {
  in.take_array(values_, recurrence_.n_values());
  n_tokens_ = n_tokens;
  n_ahead_ = n_kept_ = 0;
  ++n_replaced_;
}

}  // namespace edgeh2o
