// Attention of the rows of a prompt on tensor cores (FlashAttention-2, arXiv 2307.08691): 64 rows of a query
// head against 64 keys (32 of wide heads) at a time, over all lists of keys that they read in one softmax.
//
// Queries keep 22 bits, as the sum of two halves: column sums rank positions, and a rule must choose on a
// GPU what it chooses on the CPU. Weights of values are rounded to f16, as the values are.
#pragma once

#include "cuda/kernels/attend_rows.cuh"

namespace edgeh2o::cuda {

inline constexpr int kAttendWarps = kAttendThreads / kWarpSize;
static_assert(kAttendTile == 16 * kAttendWarps);
inline constexpr float kMasked = -3.0e38f, kNothingYet = -1.0e38f;  // of which only the second has weight

// Where piece `piece` (8 halves) of a row lies: rows of ldmatrix in different banks.
template <int kDim>
EH2O_DEVICE int tile_offset(int row, int piece) {
  return row * kDim * 2 + ((piece ^ (row & 7)) << 4);
}

// What f16 leaves of two floats, as halves again.
EH2O_DEVICE uint32_t low_halves(float a, float b, uint32_t high) {
  return pack_halves(a - half_of(high, 0), b - half_of(high, 1));
}

// Eight values of a row, from floats.
EH2O_DEVICE Words4 packed8(const float (&a)[4], const float (&b)[4]) {
  return {pack_halves(a[0], a[1]), pack_halves(a[2], a[3]), pack_halves(b[0], b[1]), pack_halves(b[2], b[3])};
}

// Starts to bring kRows rows of a cache to shared memory, as halves and padded with zeros to kDim; rows
// behind `last` are that one again.
template <int kDim, int kRows>
EH2O_DEVICE void load_rows(uint8_t* tile, const void* rows, DeviceCacheType type, const ListedKeys& keys,
                           size_t head_row, uint32_t first, uint32_t last, uint32_t dim, uint32_t stride) {
  constexpr int kPieces = kDim / 8;
  for (int i = thread_index(); i < kRows * kPieces; i += kAttendThreads) {
    const int row = i / kPieces, piece = i % kPieces;
    uint8_t* const to = tile + tile_offset<kDim>(row, piece);
    if (static_cast<uint32_t>(8 * piece) >= dim) {
      *reinterpret_cast<Words4*>(to) = Words4{};
      continue;
    }
    const uint32_t key = first + static_cast<uint32_t>(row);
    const size_t at =
        (head_row + keys.position(key < last ? key : last)) * stride + static_cast<size_t>(8 * piece);
    if (type == DeviceCacheType::kF16) {
      copy_async16(to, static_cast<const uint16_t*>(rows) + at);
    } else {
      float a[4], b[4];
      load_cached4(a, rows, type, at);
      load_cached4(b, rows, type, at + 4);
      *reinterpret_cast<Words4*>(to) = packed8(a, b);
    }
  }
}

// Logits times log2(e) of 16 queries and a tile of keys, without their mask: s[key / 8] as mma_f16 has them.
template <int kDim, int kKeys, typename LoadQueries>
EH2O_DEVICE void multiply_tile(float (&s)[kKeys / 8][4], const uint8_t* keys, uint32_t key_dim, float scale,
                               float soft_cap, const LoadQueries& load_queries) {
  const int lane = thread_index() % kWarpSize;
  const auto add_depth = [&](int k) {
    if (static_cast<uint32_t>(16 * k) >= key_dim) return;
    uint32_t high[4], low[4];
    load_queries(high, low, k);
    EH2O_UNROLL
    for (int n = 0; n < kKeys / 16; ++n) {
      uint32_t b[4];
      load_matrix4(b, keys + tile_offset<kDim>(16 * n + lane % 8 + lane / 16 * 8, 2 * k + lane / 8 % 2));
      mma_f16(s[2 * n], high, b[0], b[1]);
      mma_f16(s[2 * n + 1], high, b[2], b[3]);
      mma_f16(s[2 * n], low, b[0], b[1]);
      mma_f16(s[2 * n + 1], low, b[2], b[3]);
    }
  };
  if constexpr (kDim > 128) {  // sums of so many columns leave no registers
    EH2O_NO_UNROLL
    for (int k = 0; k < kDim / 16; ++k) add_depth(k);
  } else {
    EH2O_UNROLL
    for (int k = 0; k < kDim / 16; ++k) add_depth(k);
  }
  const float factor = soft_cap > 0.0f ? scale : scale * 1.44269504f;
  EH2O_UNROLL
  for (int n = 0; n < kKeys / 8; ++n) {
    EH2O_UNROLL
    for (int e = 0; e < 4; ++e) {
      s[n][e] *= factor;
      if (soft_cap > 0.0f) s[n][e] = soft_capped(s[n][e], soft_cap) * 1.44269504f;
    }
  }
}

// Shared memory: queries, high and low halves, [64][kDim] each, a tile of keys and one of
// values, [tile_keys][kDim] each.
template <int kDim>
EH2O_DEVICE void attend_rows(const AttendTilesArguments& a) {
  constexpr int kTileBytes = kAttendTile * kDim * 2, kKeys = tile_keys(kDim);
  EH2O_SHARED_MEMORY;
  uint8_t *const q_high = shared_memory, *const q_low = q_high + kTileBytes,
                 *const k_tile = q_low + kTileBytes, *const v_tile = k_tile + kKeys * kDim * 2;
  const int t = thread_index(), lane = t % kWarpSize, warp = t / kWarpSize;
  const uint32_t key_dim = a.heads.key_dim, value_dim = a.heads.value_dim;
  // The rows with most keys first.
  const uint32_t n_tiles = (a.n_rows + kAttendTile - 1) / kAttendTile;
  const uint32_t first_row = (n_tiles - 1 - static_cast<uint32_t>(block_x())) * kAttendTile;
  const uint32_t n_rows = a.n_rows - first_row < kAttendTile ? a.n_rows - first_row : kAttendTile;
  const uint32_t head = static_cast<uint32_t>(block_y());
  const uint32_t kv_head = head / (a.heads.n_heads / a.heads.n_kv_heads);
  const float* const q = a.qkv + static_cast<size_t>(first_row) * a.stride + head * key_dim;
  for (int i = t; i < kAttendTile * kDim / 8; i += kAttendThreads) {
    const int row = i / (kDim / 8), piece = i % (kDim / 8);
    Words4 high{}, low{};
    if (static_cast<uint32_t>(8 * piece) < key_dim) {
      const uint32_t there = static_cast<uint32_t>(row) < n_rows ? static_cast<uint32_t>(row) : n_rows - 1;
      float x[4], y[4];
      const float* const from = q + static_cast<size_t>(there) * a.stride;
      load_cached4(x, from, DeviceCacheType::kF32, static_cast<size_t>(8 * piece));
      load_cached4(y, from, DeviceCacheType::kF32, static_cast<size_t>(8 * piece + 4));
      high = packed8(x, y);
      low = {low_halves(x[0], x[1], high.x), low_halves(x[2], x[3], high.y), low_halves(y[0], y[1], high.z),
             low_halves(y[2], y[3], high.w)};
    }
    *reinterpret_cast<Words4*>(q_high + tile_offset<kDim>(row, piece)) = high;
    *reinterpret_cast<Words4*>(q_low + tile_offset<kDim>(row, piece)) = low;
  }
  const auto load_queries = [&](uint32_t(&high)[4], uint32_t(&low)[4], int k) {
    const int at = tile_offset<kDim>(warp * 16 + lane % 16, 2 * k + lane / 16);
    load_matrix4(high, q_high + at);
    load_matrix4(low, q_low + at);
  };

  // Of the lane's rows, lane / 4 and 8 more, of the warp's 16. Sums are of its own columns until the end.
  const uint32_t own_row = first_row + static_cast<uint32_t>(warp * 16 + lane / 4);
  float acc[kDim / 8][4] = {}, most[2] = {kNothingYet, kNothingYet}, total[2] = {};
  EH2O_NO_UNROLL
  for (uint32_t l = 0; l < a.n_lists; ++l) {
    const ListedRows& list = a.lists[l];
    // From the first key of the first row to the last of the last.
    const ListedKeys first_keys(list.keys, kv_head, a.first + first_row);
    const ListedKeys last_keys(list.keys, kv_head, a.first + first_row + n_rows - 1);
    const bool is_listed = list.keys.counts != nullptr;
    const uint32_t count = is_listed ? last_keys.count : last_keys.begin + last_keys.count - first_keys.begin;
    const size_t head_row = static_cast<size_t>(kv_head) * list.cache.max_context;
    float part[2] = {};
    const auto load_keys = [&](uint32_t key) {
      if (key < count) {
        load_rows<kDim, kKeys>(k_tile, list.cache.k, list.cache.k_type, first_keys, head_row, key, count - 1,
                               key_dim, key_dim);
      }
      copy_async_commit();
    };
    load_keys(0);
    EH2O_NO_UNROLL
    for (uint32_t key = 0; key < count; key += kKeys) {
      copy_async_wait<0>();
      sync_block();  // these keys are there for all, and the values before them read by all
      load_rows<kDim, kKeys>(v_tile, list.cache.v, list.cache.v_type, first_keys, head_row, key, count - 1,
                             value_dim, a.heads.value_stride);
      copy_async_commit();
      float s[kKeys / 8][4] = {};
      multiply_tile<kDim, kKeys>(s, k_tile, key_dim, a.scale, a.soft_cap, load_queries);
      if (list.biases) {
        EH2O_UNROLL
        for (int n = 0; n < kKeys / 8; ++n) {
          EH2O_UNROLL
          for (int e = 0; e < 2; ++e) {
            const uint32_t at = key + static_cast<uint32_t>(8 * n + lane % 4 * 2 + e);
            if (at >= count) continue;
            const float bias = list.biases[head_row + first_keys.position(at)] * 1.44269504f;
            s[n][e] += bias;
            s[n][2 + e] += bias;
          }
        }
      }
      const uint32_t position = first_keys.begin + key;
      const bool sees_all = is_listed ? key + kKeys <= count
                                      : list.keys.window == 0 && position + kKeys <= a.first + first_row + 1;
      if (!sees_all) {
        EH2O_UNROLL
        for (int n = 0; n < kKeys / 8; ++n) {
          EH2O_UNROLL
          for (int e = 0; e < 4; ++e) {
            const uint32_t at = static_cast<uint32_t>(8 * n + lane % 4 * 2 + e % 2);
            const uint32_t query = a.first + own_row + static_cast<uint32_t>(e / 2 * 8);
            const bool is_seen =
                is_listed ? key + at < count
                          : position + at <= query &&
                                (list.keys.window == 0 || position + at + list.keys.window > query);
            if (!is_seen) s[n][e] = kMasked;
          }
        }
      }
      uint32_t weights[kKeys / 16][4];
      EH2O_UNROLL
      for (int h = 0; h < 2; ++h) {
        float tile_most = most[h];
        EH2O_UNROLL
        for (int n = 0; n < kKeys / 8; ++n)
          tile_most = larger(tile_most, larger(s[n][2 * h], s[n][2 * h + 1]));
        tile_most = reduce_max<4>(tile_most);
        const float alpha = exp2_fast(most[h] - tile_most);
        most[h] = tile_most;
        part[h] *= alpha;
        total[h] *= alpha;
        EH2O_UNROLL
        for (int n = 0; n < kDim / 8; ++n) acc[n][2 * h] *= alpha, acc[n][2 * h + 1] *= alpha;
        EH2O_UNROLL
        for (int n = 0; n < kKeys / 8; ++n) {
          const float x = exp2_fast(s[n][2 * h] - tile_most), y = exp2_fast(s[n][2 * h + 1] - tile_most);
          part[h] += x + y;
          weights[n / 2][n % 2 * 2 + h] = pack_halves(x, y);
        }
      }
      copy_async_wait<0>();
      sync_block();  // the values are there for all, and the keys read by all
      load_keys(key + kKeys);
      EH2O_UNROLL
      for (int k = 0; k < kKeys / 16; ++k) {
        EH2O_UNROLL
        for (int n = 0; n < kDim / 16; ++n) {
          if (static_cast<uint32_t>(16 * n) >= value_dim) continue;
          uint32_t b[4];
          load_matrix4_transposed(b, v_tile + tile_offset<kDim>(16 * k + lane % 16, 2 * n + lane / 16));
          mma_f16(acc[2 * n], weights[k], b[0], b[1]);
          mma_f16(acc[2 * n + 1], weights[k], b[2], b[3]);
        }
      }
    }
    EH2O_UNROLL
    for (int h = 0; h < 2; ++h) {
      total[h] += part[h];
      const uint32_t row = own_row + static_cast<uint32_t>(8 * h);
      if (!a.states || a.is_joint || l > 1) continue;
      const float sum = reduce_add<4>(part[h]);
      if (lane % 4 != 0 || row >= a.n_rows) continue;
      float* const state =
          a.states + l * a.part_floats + 2 * (static_cast<size_t>(row) * a.heads.n_heads + head);
      state[0] = most[h], state[1] = sum;
    }
  }
  EH2O_UNROLL
  for (int h = 0; h < 2; ++h) {
    const uint32_t row = own_row + static_cast<uint32_t>(8 * h);
    float sum = reduce_add<4>(total[h]), factor = 1.0f;
    if (a.sinks) {
      const float sink = a.sinks[head] * 1.44269504f, joint = larger(most[h], sink);
      factor = exp2_fast(most[h] - joint);
      sum = multiply_add(sum, factor, exp2_fast(sink - joint));
      most[h] = joint;
    }
    if (row >= a.n_rows) continue;
    if (a.states && a.is_joint && lane % 4 == 0) {
      float* const state = a.states + 2 * (static_cast<size_t>(row) * a.heads.n_heads + head);
      state[0] = most[h], state[1] = sum;
    }
    factor = divide(factor, sum);
    float* const out = a.out + static_cast<size_t>(row) * a.out_stride + head * value_dim;
    EH2O_UNROLL
    for (int n = 0; n < kDim / 8; ++n) {
      EH2O_UNROLL
      for (int e = 0; e < 2; ++e) {
        const uint32_t column = static_cast<uint32_t>(8 * n + lane % 4 * 2 + e);
        if (column < value_dim) out[column] = acc[n][2 * h + e] * factor;
      }
    }
  }
}

// A block has 64 keys of a KV head and kColumnRows rows; its warps take 16 rows of a query head at a time.
// Shared memory: the keys [64][kDim] halves, sums of the warps [4][64].
template <int kDim>
EH2O_DEVICE void add_columns(const ColumnArguments& a) {
  EH2O_SHARED_MEMORY;
  float* const warp_sums = reinterpret_cast<float*>(shared_memory + kAttendTile * kDim * 2);
  const int t = thread_index(), lane = t % kWarpSize, warp = t / kWarpSize;
  const uint32_t first_key = static_cast<uint32_t>(block_x()) * kAttendTile, key_dim = a.heads.key_dim;
  const uint32_t kv_head = static_cast<uint32_t>(block_y()), group = a.heads.n_heads / a.heads.n_kv_heads;
  const ListedKeys keys(a.keys, kv_head, a.first + a.n_rows - 1);
  if (first_key >= keys.count || (a.is_scored && a.is_scored[kv_head] == 0)) return;
  const bool is_listed = a.keys.counts != nullptr;
  load_rows<kDim, kAttendTile>(shared_memory, a.cache.k, a.cache.k_type, keys,
                               static_cast<size_t>(kv_head) * a.cache.max_context, first_key, keys.count - 1,
                               key_dim, key_dim);
  copy_async_commit();
  copy_async_wait<0>();
  sync_block();
  float sums[8][2] = {};
  // Rows before these keys do not see them.
  const uint32_t first_seen = is_listed ? 0 : (keys.begin + first_key - a.first) / 16;
  const uint32_t part = static_cast<uint32_t>(block_z()), own_slab = part * (kColumnRows / 16);
  const uint32_t first_slab = first_seen > own_slab ? first_seen : own_slab;
  const uint32_t end_row = a.n_rows - own_slab * 16 < kColumnRows ? a.n_rows : own_slab * 16 + kColumnRows;
  EH2O_NO_UNROLL
  for (uint32_t slab = first_slab + static_cast<uint32_t>(warp); 16 * slab < end_row; slab += kAttendWarps) {
    float weights[2];
    uint32_t rows[2];
    EH2O_UNROLL
    for (int h = 0; h < 2; ++h) {
      const uint32_t row = 16 * slab + static_cast<uint32_t>(lane / 4 + 8 * h);
      weights[h] = row < a.n_rows ? 1.0f : 0.0f;
      if (a.weight == RowWeight::kVisibleKeys)
        weights[h] *= static_cast<float>(is_listed ? keys.count : row + 1);
      if (a.weight == RowWeight::kLastRows && row + a.n_last < a.n_rows) weights[h] = 0.0f;
      rows[h] = row < a.n_rows ? row : a.n_rows - 1;
    }
    EH2O_NO_UNROLL
    for (uint32_t g = 0; g < group; ++g) {
      const uint32_t head = kv_head * group + g;
      const auto load_queries = [&](uint32_t(&high)[4], uint32_t(&low)[4], int k) {
        EH2O_UNROLL
        for (int i = 0; i < 4; ++i) {
          const uint32_t at = static_cast<uint32_t>(16 * k + i / 2 * 8 + lane % 4 * 2);
          Words2 pair{};
          if (at < key_dim) {
            pair = load_constant8(a.qkv + static_cast<size_t>(rows[i % 2]) * a.stride + head * key_dim + at);
          }
          const float x = float_of_bits(pair.x), y = float_of_bits(pair.y);
          high[i] = pack_halves(x, y);
          low[i] = low_halves(x, y, high[i]);
        }
      };
      float s[8][4] = {};
      multiply_tile<kDim, kAttendTile>(s, shared_memory, key_dim, a.scale, a.soft_cap, load_queries);
      EH2O_UNROLL
      for (int h = 0; h < 2; ++h) {
        const float* const state = a.states + 2 * (static_cast<size_t>(rows[h]) * a.heads.n_heads + head);
        const float most = state[0], factor = state[1] > 0.0f ? divide(1.0f, state[1]) : 0.0f;
        EH2O_UNROLL
        for (int n = 0; n < 8; ++n) {
          EH2O_UNROLL
          for (int e = 0; e < 2; ++e) {
            const uint32_t key = first_key + static_cast<uint32_t>(8 * n + lane % 4 * 2 + e);
            float share = exp2_fast(s[n][2 * h + e] - most) * factor;
            if (!is_listed && keys.begin + key > a.first + rows[h]) share = 0.0f;
            sums[n][e] = multiply_add(weights[h], a.squares ? share * share : share, sums[n][e]);
          }
        }
      }
    }
  }
  EH2O_UNROLL
  for (int n = 0; n < 8; ++n) {
    EH2O_UNROLL
    for (int e = 0; e < 2; ++e) {
      float sum = sums[n][e];
      for (int mask = 4; mask < kWarpSize; mask *= 2) sum += shuffle_xor(sum, mask);
      if (lane < 4) warp_sums[warp * kAttendTile + 8 * n + lane * 2 + e] = sum;
    }
  }
  sync_block();
  const uint32_t key = first_key + static_cast<uint32_t>(t);
  if (t >= kAttendTile || key >= keys.count) return;
  float sum = 0.0f;
  for (int w = 0; w < kAttendWarps; ++w) sum += warp_sums[w * kAttendTile + t];
  a.sums[static_cast<size_t>(part) * a.part_stride + static_cast<size_t>(kv_head) * a.sums_stride + key] =
      sum;
}

EH2O_KERNEL_OF(attend_tiles_64, AttendTilesArguments, kAttendThreads, 4) { attend_rows<64>(a); }
EH2O_KERNEL(attend_tiles_128, AttendTilesArguments, kAttendThreads) { attend_rows<128>(a); }
EH2O_KERNEL(attend_tiles_256, AttendTilesArguments, kAttendThreads) { attend_rows<256>(a); }
EH2O_KERNEL(column_tiles_64, ColumnArguments, kAttendThreads) { add_columns<64>(a); }
EH2O_KERNEL(column_tiles_128, ColumnArguments, kAttendThreads) { add_columns<128>(a); }
EH2O_KERNEL(column_tiles_256, ColumnArguments, kAttendThreads) { add_columns<256>(a); }

}  // namespace edgeh2o::cuda
