// Arguments of the attention kernels. Types only: shared by the ops (baseline code) and the kernels (per
// ISA).
//
// Logits are in base 2 (scaled by log2(e)), and so are row maxima m; a weight is 2^(logit - m).
//
// A tile is a block of query rows of one KV head, ordered (query, head of the group), so that row r belongs
// to query r / group_size, a query's rows are contiguous, and causality cuts the rows of any key at one
// place.
#pragma once

#include <cstddef>
#include <cstdint>

namespace edgeh2o {

// What the products of prefill attention take: f32, or queries, keys, weights and values rounded to bf16 with
// sums in f32, or to f16 with sums of 32 products in f16 and the rest in f32, or to integers of 8 or 16 bits
// with sums in int32.
enum class AttentionPrecision : uint8_t { kF32, kBf16, kF16, kInt8, kInt16 };
inline constexpr size_t kAttentionPrecisions = 5;
constexpr bool is_integer(AttentionPrecision precision) { return precision >= AttentionPrecision::kInt8; }

inline constexpr float kLog2E = 1.44269504088896341f;

// AttentionPiece::n_hidden without a window: far below any number of queries.
inline constexpr ptrdiff_t kNoneHidden = PTRDIFF_MIN / 2;

// Keys and values as panels of nr = PackLayout::panel_cols columns, in 32-bit words of vpw =
// AttentionKernels::values_per_word values. Two bf16 of a word are neighbours in depth; of f16 a panel is
// [depth][nr] values, which takes as many words.
struct AttentionPiece {
  const float* k = nullptr;   // [ceil(n_keys / nr)][key_dim / vpw][nr]: keys transposed, padded with zeros
  const float* v = nullptr;   // [ceil(value_dim / nr)][v_panel_stride]: per panel [ceil(n_keys / vpw)][nr]
  size_t v_panel_stride = 0;  // words between two panels of v
  size_t n_keys = 0;
  // Keys that the tile's first query sees; each later query sees one more. Clamped to [0, n_keys].
  ptrdiff_t n_visible = 0;
  // First keys that the tile's first query does not see, because they are before its window; each later query
  // misses one more. Below 0: no key is hidden from the first -n_hidden queries.
  ptrdiff_t n_hidden = kNoneHidden;
  const float* biases = nullptr;  // [n_keys] natural logarithms added to the logits, or null
  // Positions from the first key to the tile's first query, where the tile has slopes; each later query is
  // one further on, each later key one nearer.
  ptrdiff_t distance = 0;
};

// With kInt8 and kInt16, keys and values are blocks of kLevelKeys keys, the first from the start of a piece,
// each with the numbers that its integers are rounded by; so are the weights of a row. Bytes of queries and
// keys are mixed, and those of keys are what they differ by from the mean of their block
// (integer_panels-inl.h). In words of per_word integers:
//   queries    per row [key_dim / per_word] integers, their unit, the start of their sums (int32); of bytes
//              also [key_dim] f32
//   keys       per block [kLevelKeys / nr][key_dim / per_word][nr] integers, [kLevelKeys] units; of bytes
//   also
//              [key_dim] the mean
//   values     per block [o_stride / nr][kLevelKeys / per_word][nr] integers, [o_stride] units
//   weights    per row and block kLevelKeys levels, then, per row, a unit for every block, and the start of
//   its
//              sums (int32)
inline constexpr size_t kLevelKeys = 64;

struct IntegerLayout {
  size_t per_word;  // 4: bytes, 2: numbers of 16 bits

  constexpr bool are_bytes() const { return per_word == 4; }
  constexpr size_t query_words(size_t key_dim) const {
    return key_dim / per_word + 2 + (are_bytes() ? key_dim : 0);
  }
  constexpr size_t key_words(size_t key_dim) const {  // of a key, in the mean
    return key_dim / per_word + 1 + (are_bytes() ? (key_dim + kLevelKeys - 1) / kLevelKeys : 0);
  }
  constexpr size_t value_words(size_t o_stride) const {
    return o_stride / per_word + (o_stride + kLevelKeys - 1) / kLevelKeys;
  }
  constexpr size_t weight_words(size_t n_keys) const {
    return (n_keys + kLevelKeys - 1) / kLevelKeys * (kLevelKeys / per_word + 2);
  }
};

struct AttentionTile {
  size_t n_rows = 0;  // rows below are padded to a multiple of PackLayout::float_rows
  size_t group_size = 0;
  size_t key_dim = 0, value_dim = 0;
  const float* q = nullptr;  // [padded rows][key_dim / vpw] words, scaled in base 2; padded rows are 0
  // [padded rows][weight_stride]: unnormalised weights, n_keys / vpw words; room for n_keys rounded up to nr
  float* weights = nullptr;
  size_t weight_stride = 0;
  float* o = nullptr;   // [padded rows][o_stride]: sum of weights times values
  size_t o_stride = 0;  // value_dim rounded up to nr
  // In base 2: logits become soft_cap * tanh(logit / soft_cap); 0: they stay as they are.
  float soft_cap = 0.0f;
  // [group_size], or null: what logits of a head lose for every position between query and key, in base 2.
  const float* slopes = nullptr;
  float* m = nullptr;  // [n_rows] row maxima of the logits
  float* l = nullptr;  // [n_rows] row sums of the weights
};

// Softmax state of a tile's rows over all pieces so far. Row r of o: o + (r / group_size) * o_stride
// + (r % group_size) * value_dim, normalised.
struct SoftmaxRows {
  float* m = nullptr;  // [n_rows]
  float* l = nullptr;  // [n_rows]
  float* o = nullptr;
  size_t o_stride = 0;  // floats between two queries
};

}  // namespace edgeh2o
