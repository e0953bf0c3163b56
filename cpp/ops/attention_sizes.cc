#include "ops/attention_sizes.h"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "base/arena.h"
#include "base/check.h"

namespace edgeh2o {
namespace {

constexpr size_t kMaxTileRows = 96;
// A tile's weights are written once and read about four times: they should stay in the level-2 cache.
constexpr size_t kTileWeights = (size_t{384} << 10) / sizeof(float);
constexpr size_t kPieceKeys = 1024;
// Bounds the partial column sums of a chunk.
constexpr size_t kMaxTasks = 32;

// Far more than models have: products with other sizes stay far below 2^64.
constexpr size_t kMaxHeads = size_t{1} << 16;

constexpr const char* kPrecisionNames[kAttentionPrecisions] = {"f32", "bf16", "f16", "int8", "int16"};

}  // namespace

const char* attention_precision_name(AttentionPrecision precision) {
  return kPrecisionNames[static_cast<size_t>(precision)];
}

AttentionPrecision parse_attention_precision(const std::string& name) {
  const auto* end = std::end(kPrecisionNames);
  const auto* found = std::find(std::begin(kPrecisionNames), end, name);
  EH2O_CHECK(found != end, "precision = '", name, "' is not f32, bf16, f16, int8 or int16");
  return static_cast<AttentionPrecision>(found - std::begin(kPrecisionNames));
}

const AttentionKernels& attention_kernels(const KernelTable& table, AttentionPrecision precision) {
  const AttentionKernels& kernels = table.attention[static_cast<size_t>(precision)];
  EH2O_CHECK(kernels.values_per_word > 0, "the instruction set ", table.name, " has no ",
             attention_precision_name(precision), " attention");
  return kernels;
}

std::vector<std::string> attention_precisions(const KernelTable& table) {
  std::vector<std::string> names;
  for (size_t i = 0; i < kAttentionPrecisions; ++i) {
    if (table.attention[i].values_per_word > 0) names.emplace_back(kPrecisionNames[i]);
  }
  return names;
}

size_t AttentionShape::longest_chunk() const {
  const size_t longest_call = std::min(batch_size, max_context);
  return heads.is_causal ? std::min(chunk_size, longest_call) : longest_call;
}

void AttentionHeads::check() const {
  EH2O_CHECK(n_kv_heads > 0 && n_heads > 0 && n_heads % n_kv_heads == 0, "n_heads = ", n_heads,
             " must be a positive multiple of n_kv_heads = ", n_kv_heads);
  EH2O_CHECK(n_heads <= kMaxHeads, "n_heads = ", n_heads, " must be at most ", kMaxHeads);
  for (const size_t dim : {key_dim, value_dim}) {
    EH2O_CHECK(dim > 0 && dim % 8 == 0 && dim <= 1024, "head_dim = ", dim,
               " must be a multiple of 8 between 8 and 1024");
  }
  EH2O_CHECK(!values_are_keys || key_dim == value_dim, "values of ", value_dim,
             " dimensions are not keys of ", key_dim);
  EH2O_CHECK(index.has_own() == (index.key_dim > 0) && (index.top_k > 0 || !index.has_own()) &&
                 (index.is_none() || index.scores_blocks() || n_kv_heads == 1),
             "an indexer of ", index.n_heads, " heads of ", index.key_dim, " for ", index.top_k,
             " tokens and ", n_kv_heads, " KV heads");
  EH2O_CHECK(!index.scores_blocks() || (index.has_own() && index.key_dim <= kMaxBlockKeyDim &&
                                        index.top_k % index.block_tokens == 0),
             "an indexer of keys of ", index.key_dim, " dimensions for ", index.top_k,
             " tokens in blocks of ", index.block_tokens);
  EH2O_CHECK(!index.is_per_head || (index.scores_blocks() && index.n_heads == n_kv_heads &&
                                    index.n_local * index.block_tokens <= index.top_k),
             "an indexer of ", index.n_heads, " heads for ", n_kv_heads, " KV heads, which read ",
             index.n_local, " blocks of ", index.block_tokens, " of ", index.top_k, " tokens anyway");
  EH2O_CHECK(scale > 0.0f, "scale = ", scale, " must be positive");
  EH2O_CHECK(soft_cap >= 0.0f, "soft_cap = ", soft_cap, " must be positive, or 0 for none");
  EH2O_CHECK(max_alibi_bias >= 0.0f, "max_alibi_bias = ", max_alibi_bias, " must be positive, or 0 for none");
  EH2O_CHECK(max_alibi_bias == 0.0f || index.is_none(), "what an indexer chooses has no bias by distance");
}

// As the paper and ggml have them: a geometric sequence for as many heads as the largest power of two, and
// every other one of the sequence for twice as many for those that are left.
std::vector<float> AttentionHeads::alibi_slopes() const {
  std::vector<float> slopes;
  if (max_alibi_bias == 0.0f) return slopes;
  size_t n_first = 1;
  while (2 * n_first <= n_heads) n_first *= 2;
  for (size_t head = 0; head < n_heads; ++head) {
    const size_t step = head < n_first ? 2 * (head + 1) : 2 * (head - n_first) + 1;
    slopes.push_back(
        std::exp2(-max_alibi_bias / 2.0f / static_cast<float>(n_first) * static_cast<float>(step)));
  }
  return slopes;
}

void AttentionShape::check() const {
  heads.check();
  EH2O_CHECK(max_context > 0 && max_context <= INT32_MAX, "max_context = ", max_context,
             " must be between 1 and ", INT32_MAX);
  EH2O_CHECK(batch_size > 0 && batch_size <= INT32_MAX, "batch_size = ", batch_size,
             " must be between 1 and ", INT32_MAX);
  EH2O_CHECK(chunk_size > 0, "chunk_size must be at least 1");
}

AttentionSizes::AttentionSizes(const KernelTable& table, const AttentionShape& shape,
                               const PolicyNeeds& needs) {
  const AttentionKernels& kernels = attention_kernels(table, shape.precision);
  const size_t key_dim = shape.heads.key_dim, values_per_word = kernels.values_per_word;
  is_scoring = needs.column_sums != ColumnSums::kNone;
  integers = {is_integer(shape.precision) ? values_per_word : 0};
  const bool are_integers = integers.per_word > 0;
  key_block = kernels.key_block;
  o_stride = round_up(shape.heads.value_dim, table.layout.panel_cols);
  query_words = are_integers ? integers.query_words(key_dim) : key_dim / values_per_word;
  key_words = are_integers ? integers.key_words(key_dim) : key_dim / values_per_word;
  value_words = are_integers ? integers.value_words(o_stride) : o_stride / values_per_word;
  value_step = are_integers ? value_words : table.layout.panel_cols / values_per_word;
  const size_t chunk = shape.longest_chunk();
  chunk_keys = round_up(chunk, key_block);
  n_chunks = ceil_div(std::min(shape.batch_size, shape.max_context), chunk);
  batch_keys = n_chunks * chunk_keys;
  piece_keys = std::min(kPieceKeys, round_up(shape.max_context, key_block));

  const size_t synthetic_keys = round_up(needs.max_synthetic, key_block);
  memory_keys = is_scoring ? round_up(needs.max_scored_memory, key_block) : 0;
  gather_keys = std::max(piece_keys, memory_keys) + synthetic_keys;
  block_keys = std::max(piece_keys, synthetic_keys);
  if (needs.column_sums == ColumnSums::kPerPart) block_keys = std::max({block_keys, chunk_keys, memory_keys});
  if (needs.column_sums == ColumnSums::kJoint) {
    block_keys = std::max(block_keys, memory_keys + std::max(chunk_keys, synthetic_keys));
  }
  // The odd multiple of a cache line keeps the rows of a tile out of each other's cache sets.
  weight_stride = are_integers ? round_up(weight_words(block_keys), 32) + 16 : block_keys + 16;

  const size_t set_heads = shape.set_heads(), float_rows = table.layout.float_rows;
  const size_t max_rows = std::clamp(kTileWeights / weight_stride, 2 * float_rows, kMaxTileRows);
  tile_queries = std::min(std::max(max_rows / set_heads, size_t{1}), chunk);
  tile_rows = round_up(tile_queries * set_heads, float_rows);
  const size_t n_tiles = ceil_div(chunk, tile_queries);
  tiles_per_task = ceil_div(n_tiles, kMaxTasks);
  n_tasks = ceil_div(n_tiles, tiles_per_task);
}

size_t AttentionSizes::weight_words(size_t n_keys) const {
  return integers.per_word > 0 ? integers.weight_words(n_keys)
                               : n_keys;  // f32 logits, before they become other words
}

}  // namespace edgeh2o
