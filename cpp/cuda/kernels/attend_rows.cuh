// What the kernels of attention share: rows of the cache of any type, and the keys of a list.
#pragma once

#include "cuda/kernels/arguments.h"
#include "cuda/kernels/rows.cuh"

namespace edgeh2o::cuda {

inline constexpr int kAttendThreads = 128, kKeyLanes = 8;

// Value i of rows that lie one behind the other.
EH2O_DEVICE float cached(const void* rows, DeviceCacheType type, size_t i) {
  if (type == DeviceCacheType::kQ8) {
    const uint8_t* block = static_cast<const uint8_t*>(rows) + i / kCacheBlock * kCacheBlockBytes;
    return f32_from_f16(*reinterpret_cast<const uint16_t*>(block)) *
           static_cast<float>(static_cast<int8_t>(block[2 + i % kCacheBlock]));
  }
  if (type == DeviceCacheType::kF16) return f32_from_f16(static_cast<const uint16_t*>(rows)[i]);
  return static_cast<const float*>(rows)[i];
}

EH2O_DEVICE void unpack_floats(float* out, const Words4& w) {
  out[0] = float_of_bits(w.x), out[1] = float_of_bits(w.y);
  out[2] = float_of_bits(w.z), out[3] = float_of_bits(w.w);
}

// kCount values of a row from i on, a multiple of kCount: 4 or 8.
template <DeviceCacheType kType, int kCount>
EH2O_DEVICE void load_row(float (&out)[kCount], const void* rows, size_t i) {
  if constexpr (kType == DeviceCacheType::kQ8) {  // aligned to 2 bytes
    const uint8_t* block = static_cast<const uint8_t*>(rows) + i / kCacheBlock * kCacheBlockBytes;
    const float d = f32_from_f16(*reinterpret_cast<const uint16_t*>(block));
    const auto* quants = reinterpret_cast<const uint16_t*>(block + 2 + i % kCacheBlock);
    EH2O_UNROLL
    for (int e = 0; e < kCount; ++e) {
      out[e] = d * static_cast<float>(static_cast<int8_t>(quants[e / 2] >> (8 * (e % 2))));
    }
  } else if constexpr (kType == DeviceCacheType::kF16 && kCount == 8) {
    const Words4 w = load_constant16(static_cast<const uint16_t*>(rows) + i);
    const uint32_t words[4] = {w.x, w.y, w.z, w.w};
    EH2O_UNROLL
    for (int e = 0; e < kCount; ++e) out[e] = half_of(words[e / 2], e % 2);
  } else if constexpr (kType == DeviceCacheType::kF16) {
    const Words2 w = load_constant8(static_cast<const uint16_t*>(rows) + i);
    out[0] = half_of(w.x, 0), out[1] = half_of(w.x, 1);
    out[2] = half_of(w.y, 0), out[3] = half_of(w.y, 1);
  } else {
    EH2O_UNROLL
    for (int e = 0; e < kCount; e += 4) {
      unpack_floats(out + e, load_constant16(static_cast<const float*>(rows) + i + e));
    }
  }
}

// Four values of a row of any type.
EH2O_DEVICE void load_cached4(float (&out)[4], const void* rows, DeviceCacheType type, size_t i) {
  if (type == DeviceCacheType::kQ8) {
    load_row<DeviceCacheType::kQ8>(out, rows, i);
  } else if (type == DeviceCacheType::kF16) {
    load_row<DeviceCacheType::kF16>(out, rows, i);
  } else {
    load_row<DeviceCacheType::kF32>(out, rows, i);
  }
}

// Rows of one type, so that loads of several can be on their way.
template <DeviceCacheType kType>
struct RowsOf {
  static constexpr int kCount = 8;
  EH2O_DEVICE void load(float (&out)[8], size_t i) const { load_row<kType>(out, rows, i); }
  const void* rows;
};

// Rows of any type whose width is no multiple of 8: kWidth values at a time, 4 or 1.
template <int kWidth>
struct AnyRows {
  static constexpr int kCount = kWidth;
  EH2O_DEVICE void load(float (&out)[kWidth], size_t i) const {
    if constexpr (kWidth == 4) {
      load_cached4(out, rows, type, i);
    } else {
      out[0] = cached(rows, type, i);
    }
  }
  const void* rows;
  DeviceCacheType type;
};

// f(the rows), by the widest loads that their width allows.
template <typename F>
EH2O_DEVICE void with_rows(const void* rows, DeviceCacheType type, uint32_t width, const F& f) {
  if (width % 8 == 0 && type == DeviceCacheType::kF16) return f(RowsOf<DeviceCacheType::kF16>{rows});
  if (width % 8 == 0 && type == DeviceCacheType::kQ8) return f(RowsOf<DeviceCacheType::kQ8>{rows});
  if (width % 8 == 0) return f(RowsOf<DeviceCacheType::kF32>{rows});
  if (width % 4 == 0) return f(AnyRows<4>{rows, type});
  f(AnyRows<1>{rows, type});
}

// tanh as 1 - 2 / (exp(2 x) + 1).
EH2O_DEVICE float soft_capped(float x, float cap) {
  return cap - divide(2.0f * cap, exponential(divide(2.0f * x, cap)) + 1.0f);
}

// The keys of a list that a query reads.
struct ListedKeys {
  EH2O_DEVICE ListedKeys(const KeyList& list, uint32_t kv_head, uint32_t query) {
    positions = list.positions ? list.positions + static_cast<size_t>(kv_head) * list.stride : nullptr;
    begin = list.window > 0 && query + 1 > list.window ? query + 1 - list.window : 0;
    begin = begin < list.lowest ? list.lowest : begin;
    if (list.counts) begin = 0;
    count = list.counts ? list.counts[kv_head] : query + 1 - begin;
  }
  EH2O_DEVICE uint32_t position(uint32_t key) const {
    return positions ? static_cast<uint32_t>(positions[key]) : begin + key;
  }

  const int32_t* positions;
  uint32_t begin, count;
};

}  // namespace edgeh2o::cuda
