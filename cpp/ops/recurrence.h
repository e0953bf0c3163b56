// What a recurrent layer keeps of the tokens before: numbers whose count does not depend on how many there
// were.
#pragma once

#include <algorithm>
#include <cstddef>

#include "ops/convolution.h"
#include "ops/delta_net.h"
#include "ops/selective_scan.h"
#include "ops/ssd.h"
#include "ops/wkv.h"

namespace edgeh2o {

// The matrices of its heads or channels, if it has any, then the last inputs of a convolution.
struct Recurrence {
  DeltaHeads delta;
  SsdHeads ssd;
  ScanSizes scan;
  size_t conv_dim = 0, n_conv_taps = 1;
  WkvHeads wkv{};  // whose "convolution" is the last input of the mixer, and of a network that looks back
  // Beside them the last inputs of another convolution, which has nothing to do with the matrices.
  size_t history_rows = 0, history_dim = 0;

  bool is_none() const { return n_values() == 0; }
  size_t n_matrices() const { return delta.n_state() + ssd.n_state() + scan.n_state() + wkv.n_state(); }
  size_t history_at() const { return n_matrices() + (n_conv_taps - 1) * conv_dim; }
  size_t n_values() const { return history_at() + history_rows * history_dim; }
  // Of a token: gates of heads, a rate and one decay or more each, and what comes out of the matrices.
  size_t n_gates() const { return std::max(delta.n_value_heads, ssd.n_heads); }
  size_t n_decays() const { return std::max(delta.n_decays(), ssd.n_heads); }
  // Of a token what goes into the matrices beside these.
  size_t row_dim() const {
    if (!wkv.is_none()) return wkv.row_dim();
    return ssd.is_none() ? conv_dim : ssd.row_dim();
  }
  size_t out_dim() const {
    return std::max({delta.value_dim(), ssd.inner_dim(), scan.n_channels, wkv.dim()});
  }
};

}  // namespace edgeh2o
