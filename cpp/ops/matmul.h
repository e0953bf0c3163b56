// Matrix products of activations with packed weights, in parallel over blocks of rows and panels of outputs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "base/mat_view.h"
#include "isa/kernel_table.h"
#include "quant/packed_matrix.h"

namespace edgeh2o {

// Rows of activations as the matrix kernels want them: packed to 8 bits for quantised weights, plain f32 for
// float weights. Whoever fills it decides which of the two is there.
struct Activations8 {
  uint8_t* packed = nullptr;  // tiles of tile_rows rows, see quant/packed_format.h
  size_t tile_rows = 0;
  size_t depth = 0;
  size_t scale_block = kBlock;  // values that share a scale
  size_t tile_bytes() const { return depth / kBlock * kActivationRecordPerRow * tile_rows; }
  // Where the values of a tile from depth k on begin.
  const uint8_t* record(size_t tile, size_t k) const {
    return packed + tile * tile_bytes() + k / kBlock * kActivationRecordPerRow * tile_rows;
  }
  static size_t bytes(const KernelTable& table, size_t n_rows, size_t depth);
};

// Where rows are to be packed to 8 bits, and how.
struct PackedOut {
  uint8_t* packed = nullptr;  // null where no weight is quantised
  size_t scale_block = kBlock;
  bool needs_floats = false;  // the rows as they are: of float weights, and of updates
  // What the weight asks for as well: the widest scale_block of all. buffer: where its rows are packed.
  // has_adapters: its updates, if it has any, count.
  void add(const KernelTable& table, uint8_t* buffer, const PackedMatrix& weight, bool has_adapters);
};
// For the input of all these weights.
PackedOut packed_for(const KernelTable& table, uint8_t* buffer,
                     std::initializer_list<const PackedMatrix*> weights, bool has_adapters);

struct MatmulInput {
  Activations8 packed;
  MatView<const float> rows;  // its sizes are those of the product; no data where nothing needs_floats
};

struct MatmulOutput {
  const PackedMatrix* weight = nullptr;  // [n_out][depth]
  const float* bias = nullptr;           // [n_out] or null
  float* out = nullptr;                  // [n_rows][out_stride]
  size_t out_stride = 0;
  bool accumulate = false;             // out += instead of out =
  const MatmulInput* input = nullptr;  // instead of the one for all: as many rows, of the same depth
};

// What every adapter counts in the rows of a product: [n_adapters] each.
struct AdapterScales {
  const float* all = nullptr;          // in all rows; null: no adapter counts
  const float* const* rows = nullptr;  // or in each row, null where none counts
  bool any() const { return all || rows; }
  float of(size_t row, size_t adapter) const {
    const float* scales = rows ? rows[row] : all;
    return scales ? scales[adapter] : 0.0f;
  }
};

// What products write to, and by which adapters they are made. scratch: num_threads() x
// matmul_scratch_bytes, and update_scratch_bytes, aligned.
struct MatmulContext {
  uint8_t* scratch;
  AdapterScales adapters;
};

// Bytes of scratch that matmul needs per thread.
size_t matmul_scratch_bytes(const KernelTable& table);
// And behind that of all threads for weights whose updates have at most `rank` together, 0: none.
size_t update_scratch_bytes(size_t n_rows, size_t rank);

// Tile height of packed activations for n_rows rows: for few rows, which take the matrix-vector kernels, what
// divides them best.
size_t activation_tile_rows(const KernelTable& table, size_t n_rows);

// A row has the same bits whatever rows it is multiplied with, and by which adapters these are made.
void matmul(const KernelTable& table, const MatmulInput& input, Span<const MatmulOutput> outputs,
            const MatmulContext& context);

// A product per head: out[r][h * out_step + i] = sum over j of weights[h].weight[i][j] * rows[r][h * step +
// j], all matrices of one shape and type; a step is a multiple of kBlock for quantised weights. packed takes
// Activations8::bytes of the rows. No biases.
void matmul_heads(const KernelTable& table, MatView<const float> rows, uint8_t* packed, size_t step,
                  Span<const PackedMatrix> weights, float* out, size_t out_stride, size_t out_step,
                  const MatmulContext& context);

// Fills packed from f32 rows, in parallel.
Activations8 quantize_rows(const KernelTable& table, MatView<const float> rows, const PackedOut& out);

}  // namespace edgeh2o
