// What kernels take: one structure each, which the host fills and the driver copies. Sizes are in elements,
// "stride" is what lies between the starts of two rows. All pointers are of the device.
#pragma once

#include "cuda/kernels/warp.h"

namespace edgeh2o::cuda {

// How weights lie on the device. Float matrices are rows [n_out][depth]. Quantised ones are tiles of 16
// outputs x 64 of depth, [panel][tile], padded with zeros, in the order of the fragments of mma m16n8k32:
// lane l has outputs l / 4 and l / 4 + 8 and, of every 32 of depth, the bytes from 4 (l % 4) and from
// 16 + 4 (l % 4) on, called low and high.
//   4 bits: 512 bytes, lane [32], output half [2], block of 32 [2]: word with low in its low nibbles
//   8 bits: 1,024 bytes, output half [2], lane [32], block of 32 [2]: low word, high word
// Scales: f16 [panel][tile][16 outputs][parts], parts: one per block (of 32, or 16) of the tile, then the
// minima alike. A weight is factor of its row (a power of two) * (scale * q + min); without minima q of
// 4 bits has 8 subtracted, that of 8 bits is signed.
enum class WeightFormat : uint32_t {
  kF32,
  kF16,
  kBF16,
  kQ4,
  kQ4Min,
  kQ4Small,
  kQ4SmallMin,
  kQ8,
  kQ8Min,
  kQ8Small
};

inline constexpr int kPanelRows = 16, kTileDepth = 64;
// A block of a matrix product: outputs, and rows of it or twice as many; tiles on their way.
inline constexpr int kGemmTile = 64, kGemmTallRows = 128, kGemmStages = 3;

// X(format, name of its kernels, bits, block, whether it has minima)
#define EH2O_TILED_FORMATS(X)               \
  X(kQ4, q4, 4, 32, false)                  \
  X(kQ4Min, q4_min, 4, 32, true)            \
  X(kQ4Small, q4_small, 4, 16, false)       \
  X(kQ4SmallMin, q4_small_min, 4, 16, true) \
  X(kQ8, q8, 8, 32, false)                  \
  X(kQ8Min, q8_min, 8, 32, true)            \
  X(kQ8Small, q8_small, 8, 16, false)

template <WeightFormat>
struct WeightTraits {
  static constexpr int kBits = 0, kBlock = 0;
  static constexpr bool kHasMin = false;
};
#define EH2O_WEIGHT_TRAITS(format, name, bits, block, has_min) \
  template <>                                                  \
  struct WeightTraits<WeightFormat::format> {                  \
    static constexpr int kBits = bits, kBlock = block;         \
    static constexpr bool kHasMin = has_min;                   \
    static constexpr int kBlocks = kTileDepth / block;         \
    static constexpr int kParts = kBlocks * (1 + has_min);     \
    static constexpr int kTileBytes = 128 * bits;              \
  };
EH2O_TILED_FORMATS(EH2O_WEIGHT_TRAITS)
#undef EH2O_WEIGHT_TRAITS

struct DeviceMatrix {
  const void* values;        // rows, or tiles
  const uint16_t* scales;    // of tiles
  const float* row_factors;  // [n_panels * 16], of tiles
  uint32_t n_out, depth;     // depth: of a row, without padding
  uint32_t n_tiles;          // of a panel
  WeightFormat format;
};

// Of a product with a vector: the warps of a block share the depth of a panel.
inline constexpr int kTilesThreads = 256;

// Rows of activations in 8 bits: q [row][padded] and d [row][padded / 32]; a value is d q.
struct QuantisedRows {
  int8_t* q;
  float* d;
  uint32_t padded;  // depth rounded up to kTileDepth
};

// out[row] (+)= matrix . x[row] + bias. Grid: (panels, rows), or (n_out / 4, rows) for floats; of matrix
// products: (n_out / 64, rows / 64 or 128). All but these take a matrix per head in the place of w, too: then
// heads are the third dimension of the grid, and each takes a part of the row and gives one.
inline constexpr int kMostMatrices = 3;
struct FurtherMatrix {
  DeviceMatrix w;
  const float* bias;
  float* out;
  uint32_t first_panel;  // of the grid
};
struct MultiplyArguments {
  DeviceMatrix w;
  const float* x;     // [rows][x_stride], for float matrices
  QuantisedRows xq;   // for others
  const float* bias;  // [n_out] or null
  float* out;         // [rows][out_stride]
  uint32_t x_stride, out_stride;
  uint32_t accumulates;
  uint32_t n_rows;                      // for matrix products
  const DeviceMatrix* heads = nullptr;  // of one shape and format
  uint32_t x_step = 0, out_step = 0;    // between the parts of two heads
  // Of tiles, for a vector: matrices of the same format and depth, whose panels follow those of w.
  FurtherMatrix further[kMostMatrices - 1] = {};
  uint32_t n_further = 0;
};

inline constexpr int kNormThreads = 256;
// Row r of x is group r % n_groups of row r / n_groups; or, without groups, row indices[r]. Groups of out lie
// one behind the other. Grid: (rows).
struct NormArguments {
  const float* x;
  const float* weight;  // [dim], or null for no norm
  float* out;           // as x, may be x; or null
  QuantisedRows xq;     // [rows]; q may be null
  uint32_t dim, n_groups, x_stride, out_stride;
  float eps;
  const int32_t* indices = nullptr;
  uint32_t weight_stride = 0;  // between the weights of groups: dim where each has its own
  uint32_t group_stride = 0;   // of x; 0: dim
};

// x[row] += scale * norm(y[row]), no norm where weight is null. Grid: (rows).
struct AddArguments {
  float* x;
  const float* y;
  const float* weight;
  uint32_t dim;
  float eps, scale;
};

// out[row] = the sum of weights[row][i] * x[entries[row][i]], in this order. Grid: (rows).
struct MixArguments {
  const float* x;          // [n][dim]
  const int32_t* entries;  // [rows][n_used]
  const float* weights;    // [rows][n_used]
  float* out;              // [rows][dim]
  uint32_t dim, n_used;
};

enum class GateKind : uint32_t { kSilu, kGelu, kSiluClamped, kSigmoid, kRelu };

// act(gate) * up, gate [rows][gate_stride], up [rows][dim]. Grid: (rows, columns / 512), of the padded ones.
inline constexpr uint32_t kGateColumns = 512;
struct GateArguments {
  const float* gate;
  const float* up;
  float* out;        // [rows][dim] or null
  QuantisedRows xq;  // q may be null
  uint32_t dim, gate_stride;
  GateKind kind;
};

// out[row] = scale * columns [first, first + n_columns) of row tokens[row] of a table that lies in parts of
// part_rows rows. Grid: (rows, columns / 512).
inline constexpr uint32_t kEmbedColumns = 512;
struct EmbedArguments {
  const DeviceMatrix* parts;
  const int32_t* tokens;
  float* out;  // [rows][n_columns]
  uint32_t part_rows, first, n_columns;
  float scale;
};

// kQ8: blocks of 32 values, an f16 scale and 32 bytes each, as the CPU has them (base/kv_rows.h).
enum class DeviceCacheType : uint32_t { kF16, kF32, kQ8 };
inline constexpr int kCacheBlock = 32, kCacheBlockBytes = 34;

// The cache of a layer: rows [kv_head][max_context][dim].
struct DeviceCache {
  void* k;
  void* v;
  uint32_t max_context;
  DeviceCacheType k_type, v_type;
};

struct DeviceHeads {
  uint32_t n_heads, n_kv_heads, key_dim, value_dim;
  uint32_t value_stride;  // of a row of the cache, which may begin with the value
};

// Rotates q and k of qkv [rows][stride] in place, and writes k and v of row r to position first + r.
// Grid: (n_heads + 2 n_kv_heads, rows), or (n_heads, rows) where keys and values are another layer's.
struct RopeArguments {
  float* qkv;
  const float* cos;  // [rows][n_pairs]
  const float* sin;
  DeviceCache cache;
  DeviceHeads heads;
  uint32_t stride, n_pairs, first;
  uint32_t norms_values;   // RMS norm of the heads of v, without weights
  const float* q_norm;     // [key_dim] weights of an RMS norm of every head behind the rotation, or null
  const float* k_norm;     // likewise
  const float* q_factors;  // [rows] of the queries, behind all else; or null
  float eps;
  const uint32_t* start;  // as in AttendArguments
};

// Latent attention (see LatentHeads): rows of qkv [rows][stride] are queries [n_heads][row_dim], of which the
// first `rank` are there, and the row that is cached. Queries get their rotated part from `heads` [rows]
// [n_heads][head_dim], behind nope_dim; the row is normed, rotated and written to position first + r.
// Grid: (n_heads + 1, rows).
struct LatentArguments {
  float* qkv;
  const float* heads;
  const float* cos;  // [rows][rope_dim / 2]
  const float* sin;
  const float* norm;  // [rank]
  DeviceCache cache;  // values are keys
  uint32_t n_heads, rank, nope_dim, rope_dim, stride, first;
  float eps;
  const uint32_t* start;  // as in AttendArguments
};

// The rows of the cache that queries read: all positions from `lowest` on up to their own (and within the
// window); where `counts` is set, which all queries see: the first counts[kv_head] of
// positions[kv_head][stride], or of the cache's rows as they lie if that is null.
struct KeyList {
  const int32_t* positions;
  const uint32_t* counts;
  uint32_t stride, lowest, window;
};

// Attention of every row's query at position first + r, or first + rows[r] if those are given, in ranges of
// kSplitKeys keys: ranges first_split and on of n_splits. The query heads of a KV head are cut into blocks of
// block_heads. Grid: (ranges, blocks of all KV heads, rows).
inline constexpr int kSplitKeys = 128, kAttendScratchBytes = 16 * 128 * 4;
struct AttendArguments {
  const float* qkv;  // [rows][stride], rotated
  DeviceCache cache;
  DeviceHeads heads;
  float* parts;         // [rows][n_heads][n_splits][value_dim] not yet divided by the sum
  float* states;        // [rows][n_heads][n_splits][2] maximum of the logits times log2(e), sum
  const float* biases;  // [kv_head][max_context of the cache] added to the logits of its rows, or null
  KeyList keys;
  uint32_t stride, first, first_split, n_splits, block_heads;
  float scale, soft_cap;
  const uint32_t* rows;   // of qkv, or null
  const uint32_t* start;  // a position that is added to first, or null
};

// Rows of a cache that queries read in one softmax with others.
struct ListedRows {
  DeviceCache cache;
  KeyList keys;
  const float* biases;  // as in AttendArguments
};

// Attention of n_rows queries from position first on to all lists, on tensor cores: out [rows][out_stride].
// Caches of floats are of synthetic rows, which are rounded to f16. Dimensions are multiples of 8 and at most
// those in the kernel's name, stride is a multiple of 4. states [2][part_floats] or null: as of
// JoinArguments, of the first list and of the second; or, joint, one of all. Grid: (rows / 64, n_heads).
inline constexpr int kAttendTile = 64, kMostLists = 3;
// Keys at a time: of wide heads so many as leave room in the shared memory for the queries.
EH2O_DEVICE constexpr int tile_keys(int dim) { return dim > 128 ? 32 : kAttendTile; }
struct AttendTilesArguments {
  const float* qkv;
  DeviceHeads heads;
  ListedRows lists[kMostLists];
  float* out;
  float* states;
  const float* sinks;  // as in CombineArguments
  uint32_t n_lists, stride, first, n_rows, out_stride, part_floats, is_joint;
  float scale, soft_cap;
};

// Puts the splits together: out [rows][n_heads * value_dim], or, of heads of a multiple of 32, the same in 8
// bits. Grid: (n_heads, rows).
struct CombineArguments {
  const float* parts;
  const float* states;
  float* out;  // or null
  uint32_t n_heads, value_dim, n_splits;
  const float* sinks = nullptr;  // [n_heads] logits that take a part of every softmax, or null
  QuantisedRows xq{};            // [rows] of as many columns, without padding; q may be null
};
// How they are put together: 128 splits at a time, whose factors stand here for all threads.
struct CombineShared {
  float factors[128], warps[4];
  float sums[4][128];  // of a thread's columns
  float out[512];      // some columns
};

// The state of the softmax over some ranges, first_split and on: out [rows * n_heads][2], maximum and sum.
// Grid: (rows * n_heads / 128).
struct JoinArguments {
  const float* states;
  float* out;
  uint32_t n_rows, first_split, n_joined, n_splits;  // n_rows: of all heads
  const float* sinks = nullptr;                      // as in CombineArguments
  uint32_t n_heads = 0;                              // with sinks
};

// What a query counts in column sums: 1; the keys of its softmax; 1 for the last n_last rows.
enum class RowWeight : uint32_t { kOne, kVisibleKeys, kLastRows };

// Column sums: what every key of the list receives from n_rows queries from position first on, of the softmax
// whose states are given, summed over the query heads of the KV head: sums [n_kv_heads][sums_stride].
// Grid: (keys / 4, n_kv_heads); of column_tiles, on tensor cores as attend_tiles, (keys / 64, n_kv_heads,
// rows / kColumnRows): those of other rows stand part_stride behind, and are added up by whoever reads them.
inline constexpr int kColumnRows = 256;
struct ColumnArguments {
  const float* qkv;  // as in AttendArguments
  DeviceCache cache;
  DeviceHeads heads;
  const float* states;  // [n_rows][n_heads][2]
  float* sums;
  const uint32_t* is_scored;  // [n_kv_heads], 0: nobody asks for its sums; null: all are
  KeyList keys;
  uint32_t stride, first, n_rows, sums_stride, part_stride, n_last;
  RowWeight weight;
  uint32_t squares;  // sums of the squares of the weights instead
  float scale, soft_cap;
};

// Rows that stand for several: the means of the keys and of the values of ranges of positions, without those
// that the memory set of the KV head lists. k [n_kv_heads][n_rows][key_dim], v [...][value_stride].
// Grid: (n_rows, n_kv_heads).
struct MeanArguments {
  DeviceCache cache;
  DeviceHeads heads;
  KeyList keys;            // ascending positions and their counts
  const uint32_t* ranges;  // [n_kv_heads][n_rows][2] first position, one past the last
  const uint32_t* counts;  // [n_kv_heads] ranges
  float* k;
  float* v;
  uint32_t n_rows;
};
struct MeanShared {
  float counts[128], warp_counts[4];  // 0: the position is listed; of a warp
  float sums[4][128];
};

// The positive and the negative parts of queries, side by side: of q, [max(q, 0); min(q, 0)], as products
// with bounds of keys want them. out [rows][n_heads][2 * dim]. Grid: (n_heads, rows).
struct SignArguments {
  const float* q;  // [rows][stride], n_heads heads of dim from its start on
  float* out;
  uint32_t n_heads, dim, stride;
};

// A causal convolution of every channel by itself, out [rows][channels]: of inputs x [rows][stride], times
// factor [rows][stride] if there is one, over the tokens up to a row's own; times gate [rows][stride], or,
// without one, the silu of its sum with a bias. state [n_taps - 1][channels]: inputs of the tokens before,
// the latest last. Grid: (channels / 128, rows); of keep_inputs, which lets the state go on behind the rows,
// (channels / 128).
struct ConvolveArguments {
  const float* x;
  const float* factor;
  const float* gate;
  const float* weights;  // [n_taps][channels]
  const float* biases;   // [channels], or null
  float* state;
  float* out;
  uint32_t stride, channels, n_taps, n_rows;
};

// In place, gates [rows][2][n_heads]: rates become their sigmoid, decays exp(a * softplus(decay + bias)).
// Grid: (rows * n_heads / 128).
struct DeltaGateArguments {
  float* gates;
  const float* a;       // [n_heads]
  const float* biases;  // [n_heads]
  uint32_t n_rows, n_heads;
};

// The gated delta rule, token by token: queries, keys and values of qkv [rows][stride], one after the other;
// out [rows][n_value_heads * head_dim]. The state lies as the CPU has it (ops/delta_net.h).
// Grid: (head_dim / 32, n_value_heads).
struct DeltaArguments {
  const float* qkv;
  const float* gates;  // [rows][2][n_value_heads] rates, decays
  float* state;        // [n_value_heads][head_dim / 32][head_dim][32]
  float* out;
  uint32_t stride, n_rows, n_key_heads, n_value_heads, head_dim;
  uint32_t are_grouped;  // value heads of a key head are neighbours
};

// The state-space recurrence of Mamba-2, token by token: x of the heads, what writes to the state and what
// reads it, of all groups, one after the other in rows [n_rows][stride]; out [n_rows][n_heads * head_dim].
// rates [n_rows][rate_stride] are those of the projection. rows are aligned to 16 bytes, each of them. The
// state lies as the CPU has it (ops/ssd.h). Grid: (head_dim / 16, n_heads).
struct SsdArguments {
  const float* rows;
  const float* rates;
  const float* a;       // [n_heads]
  const float* biases;  // [n_heads] of the rates
  const float* skips;   // [n_heads]
  float* state;         // [n_heads][head_dim / 16][state_dim][16]
  float* out;
  uint32_t stride, rate_stride, n_rows, n_heads, n_groups, head_dim, state_dim;
};

// A thread has a column of kSsdRows rows of the state in registers while tokens go by, a block so many of a
// tile's. What tokens bring lies in shared memory for kSsdTokens at a time.
inline constexpr int kSsdColumns = 16, kSsdRows = 16, kSsdGroups = 8, kSsdTokens = 16;
inline constexpr int kSsdTile = kSsdRows * kSsdGroups, kSsdTileWords = kSsdTile / 4;
struct SsdShared {
  Words4 writes[kSsdTokens][kSsdTileWords], reads[kSsdTokens][kSsdTileWords];
  float x[kSsdTokens][kSsdColumns];
  float rates[kSsdTokens], decays[kSsdTokens];
  float sums[kSsdTokens][kSsdGroups][kSsdColumns];  // over the rows of a thread
};

}  // namespace edgeh2o::cuda
