// Cached rows at listed positions as runs of neighbours, and copies of them one after another.
#pragma once

#include "base/kv_rows.h"

namespace edgeh2o {

// Neighbours in the cache.
struct RowRun {
  size_t first, n_rows;
};

// Puts a position behind the n_runs runs; returns how many there are then.
size_t append_position(RowRun* runs, size_t n_runs, size_t position);

// The rows of keys, and of values at the same positions unless v is null.
void copy_runs(const RowRun* runs, size_t n_runs, const KvRows& k, const KvRows* v, uint8_t* k_out,
               uint8_t* v_out);

}  // namespace edgeh2o
