#include "ops/index_choice.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "base/check.h"
#include "base/parallel.h"

namespace edgeh2o {
namespace {

// Queries that share the keys that a task has packed, and those keys: 256 of 128 dimensions are 128 KiB.
constexpr size_t kTogether = 16, kBlockKeys = 256;

}  // namespace

IndexChoice::IndexChoice(const KernelTable& table, const IndexHeads& heads, size_t max_context,
                         uint8_t* scratch, size_t n_threads)
    : table_(table), heads_(heads), max_context_(max_context) {
  const bool is_used = chooses(heads, max_context);
  n_together_ = std::max<size_t>(kTogether / std::max<size_t>(heads.n_choices(), 1), 1);
  const size_t n_rows = n_together_ * heads.n_choices();
  Arena arena(scratch);
  signed_ = arena.take<float>(is_used && heads.is_per_head ? 2 * n_rows * heads.key_dim : 0);
  scores_ = arena.take<float>(is_used ? n_rows * max_context : 0);
  panel_floats_ = round_up(kBlockKeys, table.layout.panel_cols) * heads.key_dim;
  panels_ = arena.take<float>(is_used ? n_threads * panel_floats_ : 0);
  ranked_ = arena.take<float>(is_used ? n_threads * max_context : 0);
  n_used_ = arena.used();
}

void IndexChoice::run(MatView<const float> q, MatView<const float> weights, const KvRows& keys,
                      size_t position, const ChosenPositions& out) const {
  const size_t n_free = heads_.n_free(position, q.rows), n_choices = heads_.n_choices();
  std::fill_n(out.counts, n_free * out.n_choices, 0);
  for (size_t first = n_free; first < q.rows; first += n_together_) {
    const size_t n = std::min(n_together_, q.rows - first);
    score(q.rows_from(first, n), weights.rows_from(first, n), keys,
          (position + first + n) / heads_.scored_together());
    parallel_for(n * n_choices, [&](size_t i, size_t thread) {
      const size_t row = first + i / n_choices, place = out.at(row, i % n_choices);
      float* scores = scores_ + i * max_context_;
      if (heads_.is_per_head) score_blocks(scores, position + row);
      choose(scores, position + row, ranked_ + thread * max_context_, out.positions + place * out.stride,
             out.counts + place);
    });
  }
}

// A product is what is left of it where it is negative, taken from what is left where it is not.
void IndexChoice::sign_queries(MatView<const float> q) const {
  float* out = signed_;
  for (size_t i = 0; i < q.rows; ++i) {
    for (size_t head = 0; head < heads_.n_heads; ++head, out += 2 * heads_.key_dim) {
      const float* own = q.row(i) + head * heads_.key_dim;
      for (size_t d = 0; d < heads_.key_dim; ++d) {
        out[d] = own[d];
        out[heads_.key_dim + d] = -own[d];
      }
    }
  }
}

// In the place of the scores of tokens those of blocks, of which the last ones have the largest.
void IndexChoice::score_blocks(float* scores, size_t position) const {
  constexpr float kLowest = -std::numeric_limits<float>::infinity();
  const size_t size = heads_.block_tokens, n_blocks = position / size + 1;
  for (size_t block = 0; block < n_blocks; ++block) {
    const size_t end = std::min((block + 1) * size, position + 1);
    float best = kLowest;
    for (size_t i = block * size; i < end; ++i) best = std::max(best, scores[i]);
    scores[block] = block + heads_.n_local >= n_blocks ? -kLowest : best;
  }
}

// Of all keys that the last of the queries sees.
void IndexChoice::score(MatView<const float> q, MatView<const float> weights, const KvRows& keys,
                        size_t n_keys) const {
  constexpr float kSigns[] = {1.0f, -1.0f};
  const AttentionKernels& floats = attention_kernels(table_, AttentionPrecision::kF32);
  if (heads_.is_per_head) sign_queries(q);
  parallel_for(ceil_div(n_keys, kBlockKeys), [&](size_t block, size_t thread) {
    const size_t first = block * kBlockKeys, n = std::min(kBlockKeys, n_keys - first);
    float* panels = panels_ + thread * panel_floats_;
    floats.pack_keys(keys.type, panels, keys.row(first), nullptr, n, keys.head_dim);
    for (size_t i = 0; !heads_.is_per_head && i < q.rows; ++i) {
      table_.index_scores_f32(scores_ + i * max_context_ + first, q.row(i), weights.row(i), heads_.n_heads,
                              panels, n, heads_.key_dim);
    }
    for (size_t i = 0; heads_.is_per_head && i < q.rows * heads_.n_heads; ++i) {
      table_.index_scores_f32(scores_ + i * max_context_ + first, signed_ + 2 * i * heads_.key_dim, kSigns, 2,
                              panels, n, heads_.key_dim);
    }
  });
}

void IndexChoice::choose(float* scores, size_t position, float* ranked, int32_t* out, int32_t* count) const {
  constexpr float kLowest = -std::numeric_limits<float>::infinity();
  // Of pooled keys whole blocks have one, else the block of the query's own position counts too.
  const size_t together = heads_.chosen_together();
  const size_t n_keys = heads_.is_per_head ? position / together + 1 : (position + 1) / together;
  size_t n = 0;
  for (size_t i = 0; i < n_keys; ++i) {
    if (scores[i] > kLowest) ranked[n++] = scores[i];
  }
  int32_t* end = out;
  if (n > 0) {
    const size_t n_chosen = std::min(n, heads_.top_k / together);
    std::nth_element(ranked, ranked + n_chosen - 1, ranked + n, std::greater<float>());
    const float least = ranked[n_chosen - 1];
    const auto n_above = static_cast<size_t>(
        std::count_if(ranked, ranked + n_chosen, [least](float score) { return score > least; }));
    size_t n_equal = n_chosen - n_above;  // that are taken
    for (size_t i = 0; i < n_keys; ++i) {
      const bool is_equal = scores[i] == least && n_equal > 0;
      if (is_equal) --n_equal;
      if (!(scores[i] > least) && !is_equal) continue;
      for (size_t j = i * together; j < (i + 1) * together && j <= position; ++j) {
        *end++ = static_cast<int32_t>(j);
      }
    }
  }
  for (size_t i = n_keys * together; i <= position; ++i) *end++ = static_cast<int32_t>(i);
  if (end == out) *end++ = static_cast<int32_t>(position);  // a softmax needs something
  *count = static_cast<int32_t>(end - out);
}

void pool_keys(const KernelTable& table, const BlockKeys& rule, const KvRows& keys, size_t first, size_t n,
               const KvRows& blocks) {
  const size_t dim = keys.head_dim, n_pairs = rule.inv_freq.size;
  const float share = 1.0f / static_cast<float>(rule.block_tokens);
  parallel_for(n, [&](size_t i, size_t) {
    float sum[kMaxBlockKeyDim], cos[kMaxBlockKeyDim / 2], sin[kMaxBlockKeyDim / 2];
    const size_t block = first + i, position = block * rule.block_tokens;
    std::fill_n(sum, dim, 0.0f);
    table.add_kv_rows_f32(keys.type, sum, keys.row(position), nullptr, rule.block_tokens, dim);
    table.scale_f32(sum, sum, share, dim);
    table.rms_norm_f32(sum, sum, rule.norm, dim, rule.norm_eps);
    for (size_t k = 0; k < n_pairs; ++k) {  // as fill_rope_table
      const double angle = static_cast<double>(position) * static_cast<double>(rule.inv_freq[k]);
      cos[k] = rule.rope_factor * static_cast<float>(std::cos(angle));
      sin[k] = rule.rope_factor * static_cast<float>(std::sin(angle));
    }
    table.rope_f32(sum, cos, sin, n_pairs);
    table.store_kv_row_f32(blocks.type, blocks.row(block), sum, dim);
  });
}

}  // namespace edgeh2o
