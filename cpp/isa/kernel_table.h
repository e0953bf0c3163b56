// The kernels of one instruction set as a table of function pointers. Descriptions stand at the kernels.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "base/kv_rows.h"
#include "kernels/attention_tile.h"
#include "kernels/delta_net.h"
#include "kernels/selective_scan.h"
#include "kernels/ssd.h"
#include "kernels/wkv.h"
#include "quant/packed_format.h"

namespace edgeh2o {

// How weights and activations must be packed for a table's kernels.
struct PackLayout {
  size_t panel_cols;         // nr: outputs per weight panel
  size_t tile_rows;          // mr: rows per tile of packed activations of a matrix product
  size_t vector_rows;        // rows of the largest tile of a matrix-vector kernel (vector_tile_rows)
  size_t float_vector_rows;  // rows that one with float weights takes at most
  size_t few_rows;           // up to which matrix-vector kernels, tile by tile, beat unpacking a panel once
  uint32_t signed_formats;   // bit f: 8-bit quants of PackedFormat f are stored with the offset removed
  size_t float_rows;         // rows that a float matrix product takes at once
  int32_t dot_bias;          // where dot products start, added to the sums of packed activations
  std::array<Unpacked, kPackedFormats> unpacked_as;  // by PackedFormat
  bool has_pairs;                                    // starts in packed activations are pairs
  bool is_signed(PackedFormat format) const { return signed_formats >> static_cast<int>(format) & 1; }
  // Neighbouring activations that share a scale where they meet weights of this format.
  size_t scale_block(PackedFormat format) const {
    const Unpacked kind = unpacked(format);
    return kind == Unpacked::kWords || kind == Unpacked::kBytes ? kSuperBlock : kBlock;
  }
  Unpacked unpacked(PackedFormat format) const { return unpacked_as[static_cast<size_t>(format)]; }
};

// Prefill attention, by what it multiplies. Buffers are 32-bit words of values_per_word values.
struct AttentionKernels {
  size_t values_per_word;  // 1: f32, 2: bf16, f16 or int16, 4: int8; 0: the ISA has not got these
  size_t key_block;        // keys that are packed together: nr, or kLevelKeys of integers
  void (*pack_queries)(float* out, const float* x, size_t x_stride, float factor, size_t n_queries,
                       size_t group_size, size_t head_dim);
  void (*pack_keys)(CacheType, float* out, const void* rows, const int32_t* positions, size_t n_keys,
                    size_t head_dim);
  void (*pack_values)(CacheType, float* out, size_t panel_stride, const void* rows, const int32_t* positions,
                      size_t n_keys, size_t head_dim);
  void (*attention_tile)(const AttentionTile&, const AttentionPiece&);
  void (*column_sums)(float* sums, const AttentionTile&, const AttentionPiece&, const float* row_weights);
  uint64_t (*peak)(float* out, size_t n_rounds);  // benchmark; returns the multiplications and additions
};

struct KernelTable {
  const char* name;
  PackLayout layout;
  AttentionKernels attention[kAttentionPrecisions];  // by AttentionPrecision
  AttentionPrecision best_precision;                 // the fastest, as far as is known

  void (*quantize_q8p_f32)(uint8_t* out, const float* x, size_t x_stride, size_t n_rows, size_t tile_rows,
                           size_t depth, size_t scale_block);
  void (*unpack_q_qp)(PackedFormat, uint8_t* out, const uint8_t* w, size_t n_records, size_t weights_ahead);
  void (*gemm_f32_q8_qp)(PackedFormat, float* c, size_t c_stride, const uint8_t* x, size_t x_tile_bytes,
                         const uint8_t* w, size_t n_records, size_t n_rows, size_t n_cols, bool accumulate);
  void (*gemv_f32_q8_qp)(PackedFormat, float* y, size_t y_stride, const uint8_t* x, size_t tile_rows,
                         const uint8_t* w, size_t n_records, size_t n_rows, size_t n_cols, bool accumulate,
                         size_t weights_ahead);
  void (*unpack_f32_fp)(PackedFormat, float* out, const void* w, size_t depth);
  void (*gemm_f32_f32_f32p)(float* c, size_t c_stride, const float* a, size_t a_stride, const float* b,
                            size_t b_stride, size_t n_rows, size_t n_cols, size_t depth, bool accumulate);
  void (*gemv_f32_f32_fp)(PackedFormat, float* y, size_t y_stride, const float* x, size_t x_stride,
                          const void* w, size_t panel_bytes, size_t depth, size_t n_rows, size_t n_cols,
                          bool accumulate, size_t weights_ahead);

  void (*rms_norm_f32)(float* out, const float* x, const float* weight, size_t n, float eps);
  void (*layer_norm_f32)(float* out, const float* x, const float* weight, const float* bias, size_t n,
                         float eps);
  void (*rope_f32)(float* x, const float* cos, const float* sin, size_t n_pairs);
  void (*swiglu_f32)(float* out, const float* gate, const float* up, size_t n);
  void (*geglu_f32)(float* out, const float* gate, const float* up, size_t n);
  void (*gelu_f32)(float* out, const float* x, const float* unused, size_t n);
  void (*xielu_f32)(float* out, const float* x, float p, float n, float beta, float eps, size_t size);
  void (*swiglu_clamped_f32)(float* out, const float* gate, const float* up, size_t n);
  void (*reglu_f32)(float* out, const float* gate, const float* up, size_t n);
  void (*soft_cap_f32)(float* x, float cap, size_t n);
  void (*cut_off_f32)(float* x, float n_stds, size_t n);
  void (*predict_streams_f32)(float* x, size_t stride, const float* weights, size_t n);
  void (*correct_streams_f32)(float* x, size_t stride, const float* computed, const float* weights, size_t n);
  void (*match_size_f32)(float* x, const float* like, size_t n);
  void (*add_f32)(float* out, const float* x, size_t n);
  void (*gate_f32)(float* out, const float* gate, const float* up, size_t n);
  void (*delta_net_f32)(const DeltaSlice& slice);
  void (*delta_net_chunks_f32)(const DeltaSlice& first, size_t n_slices, float* scratch);
  void (*ssd_f32)(const SsdSlice& slice);
  void (*selective_scan_f32)(const ScanSlice& slice);
  void (*wkv_f32)(const WkvSlice& slice);
  void (*wkv6_f32)(const Wkv6Slice& slice);
  void (*key_decays_f32)(float* x, const float* biases, size_t n);
  void (*row_decays_f32)(float* x, const float* biases, float a, float log_floor, size_t n);
  void (*multiply_f32)(float* out, const float* a, const float* b, size_t n);
  void (*convolve_f32)(float* out, const float* const* taps, const float* weights, size_t weight_stride,
                       size_t n_taps, size_t n);
  void (*scale_f32)(float* out, const float* x, float factor, size_t n);
  void (*load_f32_f16)(float* out, const uint16_t* x, size_t n);

  void (*store_kv_row_f32)(CacheType, uint8_t* out, const float* x, size_t head_dim);
  void (*add_kv_rows_f32)(CacheType, float* out, const void* rows, const int32_t* positions, size_t n_rows,
                          size_t head_dim);
  void (*add_kv_squares_f32)(CacheType, float* out, const void* rows, size_t n_rows, size_t head_dim);
  void (*score_blocks_f32)(float* out, size_t out_stride, const float* q, size_t q_stride, size_t n_rows,
                           const int32_t* channels, size_t n_channels, const void* blocks, size_t n_blocks,
                           size_t width);
  void (*index_scores_f32)(float* out, const float* q, const float* weights, size_t n_heads,
                           const float* panels, size_t n_keys, size_t key_dim);
  void (*softmax_factors_f32)(float* out, const float* m_part, const float* m, const float* l, size_t n_rows);
  void (*merge_softmax_f32)(const SoftmaxRows& state, const AttentionTile&, float* scratch, bool is_first);
  void (*attention_rows_f32)(CacheType k_type, CacheType v_type, const AttentionTile&, const void* k,
                             const void* v, const int32_t* positions, size_t n_keys, const float* biases,
                             ptrdiff_t distance, size_t n_next);

  // As AttentionKernels::peak.
  uint64_t (*peak_q4)(float* out, size_t n_rounds);
  uint64_t (*peak_q8)(float* out, size_t n_rounds);
  // Benchmark; n_bytes: a multiple of 512.
  float (*peak_read)(const float* values, size_t n_bytes, size_t bytes_ahead);
};

// What an ISA that adds products of bf16 to another one does not share with it.
struct Bf16Addition {
  AttentionKernels attention;
  bool is_preferred;
};

}  // namespace edgeh2o
