#include "ops/row_runs.h"

#include <algorithm>
#include <cstring>

#include "base/arena.h"

namespace edgeh2o {
namespace {

// Rows that lie apart come from memory while those so many runs before them are copied; the processor goes
// on by itself in long runs.
constexpr size_t kRunsAhead = 12, kRunBytesAhead = 512;

void fetch(const KvRows& rows, const RowRun& run, size_t row_bytes) {
  const uint8_t* row = rows.row(run.first);
  const size_t n_bytes = std::min(run.n_rows * row_bytes, kRunBytesAhead);
  for (size_t byte = 0; byte < n_bytes; byte += kAlignment) __builtin_prefetch(row + byte);
}

}  // namespace

size_t append_position(RowRun* runs, size_t n_runs, size_t position) {
  if (n_runs > 0 && runs[n_runs - 1].first + runs[n_runs - 1].n_rows == position) {
    ++runs[n_runs - 1].n_rows;
    return n_runs;
  }
  runs[n_runs] = {position, 1};
  return n_runs + 1;
}

void copy_runs(const RowRun* runs, size_t n_runs, const KvRows& k, const KvRows* v, uint8_t* k_out,
               uint8_t* v_out) {
  const size_t k_bytes = kv_row_bytes(k.type, k.head_dim),
               v_bytes = v ? kv_row_bytes(v->type, v->head_dim) : 0;
  for (size_t i = 0; i < n_runs; ++i) {
    if (i + kRunsAhead < n_runs) {
      fetch(k, runs[i + kRunsAhead], k_bytes);
      if (v) fetch(*v, runs[i + kRunsAhead], v_bytes);
    }
    const auto [first, n_rows] = runs[i];
    std::memcpy(k_out, k.row(first), n_rows * k_bytes);
    k_out += n_rows * k_bytes;
    if (!v) continue;
    std::memcpy(v_out, v->row(first), n_rows * v_bytes);
    v_out += n_rows * v_bytes;
  }
}

}  // namespace edgeh2o
