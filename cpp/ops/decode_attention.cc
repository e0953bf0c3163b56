#include "ops/decode_attention.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "base/parallel.h"
#include "ops/attention_sinks.h"

namespace edgeh2o {
namespace {

constexpr size_t kRangeKeys = 256;
// Results wait for those before them in rounds, whose memory holds one token at least, or more tokens in so
// many ranges per thread and in all, or so many bytes: all of 16 tokens at once would take 68 MB of 32,000
// positions and 16 heads of latent attention.
constexpr size_t kRangesPerRound = 8, kRoundBytes = size_t{4} << 20;

// No more rows are gathered than the prompt has tokens; both parts may end with a range that is not full.
size_t max_ranges(const AttentionPlan& plan) {
  return ceil_div(plan.shape.max_context, kRangeKeys) + 1 +
         ceil_div(plan.needs.max_decode_synthetic, kRangeKeys);
}

size_t result_floats(const AttentionPlan& plan) {
  return plan.shape.heads.group_size() * (2 + plan.sizes.o_stride);
}

// Results that a KV head has room for.
size_t max_results(const AttentionPlan& plan, size_t n_threads) {
  const size_t n_ranges = max_ranges(plan);
  // Sums of weights are made when all ranges are merged.
  const size_t n_tokens = plan.shape.sums_weights ? kMaxSummedTokens : 1;
  const size_t of_bytes = kRoundBytes / (plan.shape.heads.n_kv_heads * result_floats(plan) * sizeof(float));
  const size_t of_threads = kMaxDecodeTokens * std::max(kRangesPerRound, n_threads);
  return std::min(kMaxDecodeTokens * n_ranges, std::max({n_tokens * n_ranges, of_threads, of_bytes}));
}

}  // namespace

DecodeAttention::DecodeAttention(const AttentionPlan& plan, uint8_t* scratch, size_t n_threads)
    : plan_(plan) {
  const AttentionHeads& heads = plan.shape.heads;
  const size_t n_ranges = max_ranges(plan), n_rows = kMaxDecodeTokens * group_size();
  Arena arena(scratch);
  keys_ = arena.take<HeadKeys>(heads.n_kv_heads * kMaxDecodeTokens);
  range_ends_ = arena.take<size_t>(heads.n_kv_heads * kMaxDecodeTokens);
  q_ = arena.take<float>(kMaxDecodeTokens * heads.q_dim());
  weights_ = arena.take<float>(n_threads * n_rows * kRangeKeys);
  summed_ = arena.take<float>(plan.shape.sums_weights
                                  ? heads.n_kv_heads * n_ranges * kMaxSummedTokens * group_size() * kRangeKeys
                                  : 0);
  n_results_ = max_results(plan, n_threads);
  results_ = arena.take<float>(heads.n_kv_heads * n_results_ * result_floats(plan));
  synthetic_ = arena.take<PromptMemory::Rows>(heads.n_kv_heads);
  for (size_t head = 0; head < heads.n_kv_heads; ++head) {
    PromptMemory::Rows rows;
    rows.capacity = plan.needs.max_decode_synthetic;
    rows.k.data = arena.take<uint8_t>(rows.capacity * kv_row_bytes(CacheType::kF32, heads.key_dim));
    rows.v.data = arena.take<uint8_t>(rows.capacity * kv_row_bytes(CacheType::kF32, heads.value_dim));
    rows.biases = arena.take<float>(rows.capacity);
    if (scratch) synthetic_[head] = rows;
  }
  merged_ = arena.take<float>(heads.n_kv_heads * 4 * n_rows);
  gathered_bytes_ = kRangeKeys * kv_row_bytes(CacheType::kF32, std::max(heads.key_dim, heads.value_dim));
  gathered_ = arena.take<uint8_t>(n_threads * 2 * gathered_bytes_);
  n_used_ = arena.used();
}

size_t DecodeAttention::scratch_bytes(const AttentionPlan& plan, size_t n_threads) {
  return DecodeAttention(plan, nullptr, n_threads).n_used_;
}

size_t DecodeAttention::HeadKeys::n_ranges() const {
  return ceil_div(n_rows, kRangeKeys) + ceil_div(n_keys, kRangeKeys);
}

DecodeAttention::Range DecodeAttention::range(const HeadKeys& keys, size_t range_idx) {
  const size_t n_rows = keys.n_rows, n_of_rows = ceil_div(n_rows, kRangeKeys);
  const bool is_of_rows = range_idx < n_of_rows;
  const size_t first = (is_of_rows ? range_idx : range_idx - n_of_rows) * kRangeKeys,
               end = is_of_rows ? n_rows : keys.n_keys;
  return {is_of_rows, first, first < end ? std::min(kRangeKeys, end - first) : 0};
}

void DecodeAttention::set_memory(size_t token, size_t kv_head, const MemorySet& memory, size_t position,
                                 const LayerKv& kv, const PromptMemory::Rows* copy) {
  EH2O_DASSERT(token < kMaxDecodeTokens && memory.synthetic.count <= plan_.needs.max_decode_synthetic);
  EH2O_DASSERT(memory.positions != nullptr || memory.range.end == position);
  const size_t n_keys = memory.n_positions() + 1;
  HeadKeys& keys = keys_[kv_head * kMaxDecodeTokens + token];
  keys = {nullptr, memory.positions, memory.positions ? 0 : position + 1 - n_keys, n_keys, position};
  if (memory.synthetic.count == 0) {
    if (copy) read_copy(*copy, keys);
    return;
  }
  const AttentionHeads& heads = plan_.shape.heads;
  const SyntheticRows& given = memory.synthetic;
  PromptMemory::Rows& rows = synthetic_[kv_head];
  rows.k = {kv.k_head0.type, rows.k.data, heads.key_dim};
  rows.v = {kv.v_head0.type, rows.v.data, heads.value_dim};
  rows.n_rows = given.count;
  for (size_t i = 0; i < given.count; ++i) {
    plan_.table.store_kv_row_f32(rows.k.type, rows.k.row(i), given.k + i * heads.key_dim, heads.key_dim);
    plan_.table.store_kv_row_f32(rows.v.type, rows.v.row(i), given.v + i * heads.value_dim, heads.value_dim);
  }
  std::copy_n(given.biases, given.count, rows.biases);
  keys.rows = &rows;
  keys.n_rows = rows.n_rows;
}

// Where what follows the copy is read without a gap.
void DecodeAttention::read_copy(const PromptMemory::Rows& copy, HeadKeys& keys) {
  const int32_t* const listed = keys.positions;
  if (listed == nullptr) {
    if (keys.begin == 0) {
      keys.rows = &copy;
      keys.n_rows = copy.n_rows;
    }
  } else {
    const int32_t* const end = listed + keys.n_keys - 1;
    const auto n =
        static_cast<size_t>(std::lower_bound(listed, end, static_cast<int32_t>(copy.n_rows)) - listed);
    if (keys.n_keys - n == keys.position + 1 - copy.n_rows) {
      keys.rows = &copy;
      keys.n_rows = n;
      keys.listed_rows = listed;
      keys.positions = nullptr;
    }
  }
  if (keys.rows == nullptr) return;
  keys.begin = copy.n_rows;
  keys.n_keys = keys.position + 1 - copy.n_rows;
}

void DecodeAttention::set_memory(size_t token, size_t kv_head, const PromptMemory::Rows& rows, size_t begin,
                                 size_t position) {
  EH2O_DASSERT(token < kMaxDecodeTokens && begin <= position && rows.n_rows <= begin);
  keys_[kv_head * kMaxDecodeTokens + token] = {&rows,    nullptr, begin,      position + 1 - begin,
                                               position, nullptr, rows.n_rows};
}

void DecodeAttention::set_positions(size_t token, size_t kv_head, const int32_t* positions, size_t n) {
  EH2O_DASSERT(token < kMaxDecodeTokens && n > 0);
  keys_[kv_head * kMaxDecodeTokens + token] = {nullptr, positions, 0, n,
                                               static_cast<size_t>(positions[n - 1])};
}

// Tokens from `token` on that read the same keys in a range: they go together, as rows of one tile. Only
// where the range is full: how the last few keys are summed up depends on the number of rows. Rows that have
// biases by distance are neighbours.
size_t DecodeAttention::count_alike(size_t kv_head, size_t token, size_t n_tokens, size_t range_idx) const {
  const HeadKeys& first = keys(kv_head, token);
  const size_t n_keys = range(first, range_idx).n_keys;
  size_t end = token + 1;
  if (n_keys < kRangeKeys) return 1;
  for (; end < n_tokens; ++end) {
    const HeadKeys& other = keys(kv_head, end);
    if (!other.reads_like(first)) break;
    if (range(other, range_idx).n_keys != n_keys) break;
    if (!plan_.slopes.empty() && other.position != first.position + (end - token)) break;
  }
  return end - token;
}

AttentionTile DecodeAttention::range_result(const Round& round, size_t kv_head, size_t range_idx,
                                            size_t token, size_t n_tokens) const {
  const AttentionHeads& heads = plan_.shape.heads;
  const size_t n_rows = round.n_tokens * group_size(), first_row = token * group_size();
  float* results = results_ + kv_head * n_results_ * result_floats(plan_) +
                   (range_idx - round.first) * round.n_tokens * result_floats(plan_);
  AttentionTile tile;
  tile.n_rows = n_tokens * group_size();
  tile.group_size = group_size();
  tile.key_dim = heads.key_dim;
  tile.value_dim = round.value_dim;
  tile.soft_cap = heads.soft_cap * kLog2E;
  if (!plan_.slopes.empty()) tile.slopes = plan_.slopes.data() + kv_head * group_size();
  tile.q = q_ + (kv_head * kMaxDecodeTokens + token) * group_size() * heads.key_dim;
  tile.weight_stride = kRangeKeys;
  tile.m = results + first_row;
  tile.l = results + n_rows + first_row;
  tile.o_stride = plan_.sizes.o_stride;
  tile.o = results + 2 * n_rows + first_row * tile.o_stride;
  return tile;
}

size_t DecodeAttention::bytes_read(size_t n_tokens, const LayerKv& kv) const {
  const auto row_bytes = [&](const KvRows& k, const KvRows& v) {
    return kv_row_bytes(k.type, k.head_dim) +
           (plan_.shape.heads.values_are_keys ? 0 : kv_row_bytes(v.type, v.head_dim));
  };
  const size_t bytes_of_cached = row_bytes(kv.k_head0, kv.v_head0);
  size_t n_bytes = 0;
  for (size_t head = 0; head < plan_.shape.heads.n_kv_heads; ++head) {
    for (size_t token = 0; token < n_tokens; ++token) {
      const HeadKeys& read = keys(head, token);
      const HeadKeys* before = token > 0 ? &keys(head, token - 1) : nullptr;
      const bool shares = before && read.reads_like(*before);
      n_bytes += (read.n_keys - (shares ? std::min(read.n_keys, before->n_keys) : 0)) * bytes_of_cached;
      if (read.rows && !shares) n_bytes += read.n_rows * row_bytes(read.rows->k, read.rows->v);
    }
  }
  return n_bytes;
}

// Whether every kNeighbourRows of the listed positions are neighbours, as pages are: such rows are read in
// place.
bool DecodeAttention::lies_in_pages(const HeadKeys& keys, const Range& range) {
  const size_t end = range.first + range.n_keys;
  const int32_t* const listed = keys.listed(range);
  if (listed == nullptr || range.n_keys % kNeighbourRows != 0) return false;
  if (!range.is_of_rows && end >= keys.n_keys) return false;  // has the token's own
  constexpr size_t kLast = kNeighbourRows - 1;
  for (size_t i = range.first; i < end; i += kNeighbourRows) {
    if (listed[i + kLast] - listed[i] != int32_t{kLast}) return false;
  }
  return true;
}

// Whether a range is read where it lies.
bool DecodeAttention::is_in_place(const HeadKeys& keys, const Range& range) {
  return keys.listed(range) == nullptr || lies_in_pages(keys, range);
}

// The rows of a range at listed positions, the token's own among them; returns the number of runs.
size_t DecodeAttention::find_runs(const HeadKeys& keys, const Range& range, RowRun* runs) {
  const bool has_own = !range.is_of_rows && range.first + range.n_keys == keys.n_keys;
  const int32_t* const listed = keys.listed(range);
  const size_t end = range.first + range.n_keys - has_own;
  size_t n_runs = 0;
  for (size_t i = range.first; i < end; ++i) {
    n_runs = append_position(runs, n_runs, static_cast<size_t>(listed[i]));
  }
  return has_own ? append_position(runs, n_runs, keys.position) : n_runs;
}

// The keys and values of a range as rows one after another: where they lie, or copied to `gathered`.
DecodeAttention::Rows DecodeAttention::find_rows(const HeadKeys& keys, const Range& range, const LayerKv& kv,
                                                 size_t kv_head, uint8_t* gathered) const {
  const bool is_one_row = plan_.shape.heads.values_are_keys;
  const KvRows k = range.is_of_rows ? keys.rows->k : kv.k(kv_head),
               v = range.is_of_rows ? keys.rows->v : kv.v(kv_head);
  const int32_t* const listed = keys.listed(range);
  if (listed == nullptr) {
    const size_t first = keys.first_position(range);
    return {k.row(first), is_one_row ? k.row(first) : v.row(first)};
  }
  if (lies_in_pages(keys, range)) {
    return {k.row(0), is_one_row ? k.row(0) : v.row(0), listed + range.first};
  }
  RowRun runs[kRangeKeys];
  const size_t n_runs = find_runs(keys, range, runs);
  uint8_t* values = gathered + gathered_bytes_;
  copy_runs(runs, n_runs, k, is_one_row ? nullptr : &v, gathered, values);
  return {gathered, is_one_row ? gathered : values};
}

float* DecodeAttention::summed_weights(size_t kv_head, size_t range_idx, size_t token) const {
  const size_t range = kv_head * max_ranges(plan_) + range_idx;
  return summed_ + (range * kMaxSummedTokens + token) * group_size() * kRangeKeys;
}

// The weights of a range were normalised within it; `merged_` has the whole softmax.
void DecodeAttention::add_weights(const Round& round, size_t kv_head, size_t range_idx, float* sums) const {
  const size_t n_rows = group_size();
  for (size_t token = 0; token < round.n_tokens; ++token) {
    const Range range = DecodeAttention::range(keys(kv_head, token), range_idx);
    const AttentionTile part = range_result(round, kv_head, range_idx, token, 1);
    const float *m = merged_ + (kv_head * kMaxDecodeTokens + token) * 4 * n_rows, *l = m + n_rows,
                *weights = summed_weights(kv_head, range_idx, token);
    for (size_t row = 0; row < n_rows && range.n_keys > 0; ++row, weights += kRangeKeys) {
      const float factor = std::exp2(part.m[row] - m[row]) / l[row];
      for (size_t i = 0; i < range.n_keys; ++i) sums[range.first + i] += factor * weights[i];
    }
  }
}

void DecodeAttention::run(MatView<const float> q, const LayerKv& kv, MatView<float> out, KeySums sums) const {
  const AttentionHeads& heads = plan_.shape.heads;
  const size_t width = group_size() * heads.key_dim, n_tokens = q.rows;
  EH2O_DASSERT(sums.data == nullptr || (plan_.shape.sums_weights && n_tokens <= kMaxSummedTokens));
  size_t n_ranges = 0;  // of the token and head with the most
  for (size_t head = 0; head < heads.n_kv_heads; ++head) {
    for (size_t token = 0; token < n_tokens; ++token) {
      n_ranges = std::max(n_ranges, keys(head, token).n_ranges());
      plan_.table.scale_f32(q_ + (head * kMaxDecodeTokens + token) * width, q.row(token) + head * width,
                            heads.scale * kLog2E, width);
    }
  }
  const size_t per_round = n_results_ / n_tokens, value_dim = out.data ? heads.value_dim : 0;
  for (size_t first = 0; first < n_ranges; first += per_round) {
    const Round round{first, std::min(first + per_round, n_ranges), n_tokens, value_dim};
    attend(round, kv, sums.data != nullptr);
    merge(round, kv, out);
  }
  if (sums.data == nullptr) return;
  EH2O_DASSERT(n_ranges <= per_round);
  const Round round{0, n_ranges, n_tokens, value_dim};
  parallel_for(heads.n_kv_heads * n_ranges, [&](size_t task, size_t) {
    const size_t kv_head = task / n_ranges;
    add_weights(round, kv_head, task % n_ranges, sums.data + kv_head * sums.stride);
  });
}

// Whether no token shares rows with another.
bool DecodeAttention::lists_all(size_t n_tokens) const {
  for (size_t head = 0; head < plan_.shape.heads.n_kv_heads; ++head) {
    for (size_t token = 0; token < n_tokens; ++token) {
      if (!keys(head, token).is_listed()) return false;
    }
  }
  return true;
}

// Ranges of the round, of one KV head (and token, if each token is a part of its own) after another: fills
// range_ends_ [n_kv_heads * n_parts], returns how many there are.
size_t DecodeAttention::count_ranges(const Round& round, size_t n_parts) const {
  const size_t n_of_part = round.n_tokens / n_parts;
  size_t n = 0;
  for (size_t i = 0; i < plan_.shape.heads.n_kv_heads * n_parts; ++i) {
    size_t end = round.first;
    for (size_t token = 0; token < n_of_part; ++token) {
      end = std::max(end, keys(i / n_parts, i % n_parts * n_of_part + token).n_ranges());
    }
    range_ends_[i] = n += std::min(end, round.end) - round.first;
  }
  return n;
}

// Ranges that lie one after another go together, so that a thread fetches the next one beforehand. Where no
// token shares rows with another, each has ranges of its own.
void DecodeAttention::attend(const Round& round, const LayerKv& kv, bool keeps_weights) const {
  const size_t n_parts = lists_all(round.n_tokens) ? round.n_tokens : 1, part = round.n_tokens / n_parts;
  const size_t n_items = count_ranges(round, n_parts);
  parallel_ranges(n_items, [&](size_t first, size_t end, size_t thread) {
    size_t i = 0;
    for (size_t item = first; item < end; ++item) {
      while (item >= range_ends_[i]) ++i;
      const size_t kv_head = i / n_parts, first_token = i % n_parts * part, end_token = first_token + part;
      const size_t range_idx = round.first + item - (i > 0 ? range_ends_[i - 1] : 0);
      for (size_t token = first_token, n_alike; token < end_token; token += n_alike) {
        n_alike = count_alike(kv_head, token, end_token, range_idx);
        const HeadKeys& read = keys(kv_head, token);
        const Range now = range(read, range_idx), next = range(read, range_idx + 1);
        const bool is_next_adjacent = item + 1 < std::min(end, range_ends_[i]) &&
                                      next.is_of_rows == now.is_of_rows && token + n_alike == end_token &&
                                      is_in_place(read, now) && is_in_place(read, next);
        attend_range(round, kv, kv_head, range_idx, token, n_alike, is_next_adjacent ? next.n_keys : 0,
                     keeps_weights ? summed_weights(kv_head, range_idx, token)
                                   : weights_ + thread * kMaxDecodeTokens * group_size() * kRangeKeys,
                     gathered_ + thread * 2 * gathered_bytes_);
      }
    }
  });
}

// n_next: keys of the range behind that are read next.
void DecodeAttention::attend_range(const Round& round, const LayerKv& kv, size_t kv_head, size_t range_idx,
                                   size_t token, size_t n_alike, size_t n_next, float* weights,
                                   uint8_t* gathered) const {
  const HeadKeys& read = keys(kv_head, token);
  const Range now = range(read, range_idx);
  if (now.n_keys == 0) return;
  const Rows rows = find_rows(read, now, kv, kv_head, gathered);
  EH2O_DASSERT(plan_.slopes.empty() || !read.listed(now));  // whose distances differ
  const auto distance = static_cast<ptrdiff_t>(read.position - read.first_position(now));
  AttentionTile tile = range_result(round, kv_head, range_idx, token, n_alike);
  tile.weights = weights;
  const auto [k_type, v_type] = now.is_of_rows ? CacheTypes{read.rows->k.type, read.rows->v.type}
                                               : CacheTypes{kv.k_head0.type, kv.v_head0.type};
  plan_.table.attention_rows_f32(
      k_type, v_type, tile, rows.k, rows.v, rows.positions, now.n_keys,
      now.is_of_rows && read.rows->biases ? read.rows->biases + now.first : nullptr, distance, n_next);
}

// The results of a round to those before, in order.
void DecodeAttention::merge(const Round& round, const LayerKv& kv, MatView<float> out) const {
  const AttentionHeads& heads = plan_.shape.heads;
  const size_t n_rows = group_size(), n_tokens = round.n_tokens;
  parallel_for(heads.n_kv_heads * n_tokens, [&](size_t task, size_t) {
    const size_t kv_head = task / n_tokens, token = task % n_tokens;
    float* m = merged_ + (kv_head * kMaxDecodeTokens + token) * 4 * n_rows;
    float* o = round.value_dim > 0 ? out.row(token) + kv_head * n_rows * heads.value_dim : nullptr;
    const SoftmaxRows state{m, m + n_rows, o, 0};
    if (kv.sinks && round.first == 0) {
      begin_with_sinks(state, kv.sinks + kv_head * n_rows, n_rows, n_rows, round.value_dim);
    }
    const size_t end = std::min(round.end, keys(kv_head, token).n_ranges());
    for (size_t i = round.first; i < end; ++i) {
      plan_.table.merge_softmax_f32(state, range_result(round, kv_head, i, token, 1), m + 2 * n_rows,
                                    !kv.sinks && i == 0);
    }
  });
}

}  // namespace edgeh2o
