#include "ops/matmul.h"

#include <algorithm>

#include "base/check.h"
#include "base/parallel.h"

namespace edgeh2o {
namespace {

// Depth of a weight panel that is unpacked at a time: 768 x 32 outputs of unpacked 4-bit weights are 28 KB
// and stay in a 32 KB L1 cache; a float panel of 256 x 32 is 32 KB. Multiples of 256 (two-level headers).
constexpr size_t kDepthQ = 768, kDepthF32 = 256;
// Rows that share an unpacked panel: the more, the cheaper the unpacking; 192 x 1,536 8-bit activations are
// 0.4 MB.
constexpr size_t kRowBlock = 192;

struct Task {
  const MatmulOutput* output;
  size_t panel, first_row, n_rows;
};

// Tasks are ordered by row block, then output, then panel, so that threads share a row block in their caches.
class TaskGrid {
 public:
  TaskGrid(Span<const MatmulOutput> outputs, size_t n_rows, size_t row_block)
      : outputs_(outputs), n_rows_(n_rows), row_block_(row_block) {
    for (const MatmulOutput& output : outputs) panels_ += output.weight->n_panels();
  }
  size_t size() const { return panels_ * ceil_div(n_rows_, row_block_); }
  Task operator[](size_t i) const {
    const size_t first_row = i / panels_ * row_block_;
    size_t panel = i % panels_;
    const MatmulOutput* output = outputs_.begin();
    while (panel >= output->weight->n_panels()) panel -= output++->weight->n_panels();
    return {output, panel, first_row, std::min(row_block_, n_rows_ - first_row)};
  }

 private:
  Span<const MatmulOutput> outputs_;
  size_t n_rows_, row_block_, panels_ = 0;
};

void run_vector(const KernelTable& table, const MatmulInput& input, const Task& task, float* out,
                size_t n_cols) {
  const PackedMatrix& weight = *task.output->weight;
  float result[64];
  float* y = task.output->accumulate ? result : out;
  if (weight.is_quantised()) {
    table.gemv_f32_q8_qp(weight.format(), y, input.packed.packed, weight.panel(task.panel),
                         weight.cols() / kBlock, n_cols);
  } else {
    table.gemv_f32_f32_fp(weight.format(), y, input.rows.row(0), weight.panel(task.panel), weight.cols(),
                          n_cols);
  }
  if (task.output->accumulate) table.add_f32(out, result, n_cols);
}

void run_matrix(const KernelTable& table, const MatmulInput& input, const Task& task, float* out,
                size_t n_cols, uint8_t* scratch) {
  const PackedMatrix& weight = *task.output->weight;
  const size_t depth = weight.cols(), step = weight.is_quantised() ? kDepthQ : kDepthF32;
  for (size_t k = 0; k < depth; k += step) {
    const size_t count = std::min(step, depth - k);
    const bool accumulate = task.output->accumulate || k > 0;
    const uint8_t* panel = weight.panel_at(task.panel, k);
    if (weight.is_quantised()) {
      const Activations8& x = input.packed;
      table.unpack_q_qp(weight.format(), scratch, panel, count / kBlock);
      table.gemm_f32_q8_qp(weight.format(), out, task.output->out_stride,
                           x.packed + task.first_row / x.tile_rows * x.tile_bytes() +
                               k / kBlock * kActivationRecordPerRow * x.tile_rows,
                           x.tile_bytes(), scratch, count / kBlock, task.n_rows, n_cols, accumulate);
    } else {
      float* unpacked = reinterpret_cast<float*>(scratch);
      table.unpack_f32_fp(weight.format(), unpacked, panel, count);
      table.gemm_f32_f32_f32p(out, task.output->out_stride, input.rows.row(task.first_row) + k,
                              input.rows.stride, unpacked, table.layout.panel_cols, task.n_rows, n_cols,
                              count, accumulate);
    }
  }
}

}  // namespace

size_t Activations8::bytes(const KernelTable& table, size_t n_rows, size_t depth) {
  return round_up(n_rows, table.layout.tile_rows) * ceil_div(depth, kBlock) * kActivationRecordPerRow;
}

size_t matmul_scratch_bytes(const KernelTable& table) {
  const size_t per_column = std::max(kDepthQ / kBlock * max_unpacked_per_column(), kDepthF32 * sizeof(float));
  return round_up(per_column * table.layout.panel_cols, kAlignment);
}

void matmul(const KernelTable& table, const MatmulInput& input, Span<const MatmulOutput> outputs,
            uint8_t* scratch) {
  for (const MatmulOutput& output : outputs) {
    EH2O_CHECK(output.weight->cols() == input.rows.cols, "matmul: activations have ", input.rows.cols,
               " columns, the weight has ", output.weight->cols());
  }
  const size_t n_rows = input.rows.rows;
  const size_t nr = table.layout.panel_cols;
  const TaskGrid grid(outputs, n_rows, round_up(kRowBlock, table.layout.tile_rows));
  // A single row makes panels too short for a task each.
  const size_t group =
      n_rows == 1 ? std::max<size_t>(1, grid.size() / (static_cast<size_t>(num_threads()) * 4)) : 1;
  parallel_for(ceil_div(grid.size(), group), [&](size_t first, size_t thread) {
    for (size_t i = first * group; i < std::min(grid.size(), (first + 1) * group); ++i) {
      const Task task = grid[i];
      const MatmulOutput& output = *task.output;
      const size_t column = task.panel * nr, n_cols = std::min(nr, output.weight->rows() - column);
      float* out = output.out + task.first_row * output.out_stride + column;
      if (n_rows == 1) {
        run_vector(table, input, task, out, n_cols);
      } else {
        run_matrix(table, input, task, out, n_cols, scratch + thread * matmul_scratch_bytes(table));
      }
      for (size_t row = 0; output.bias && row < task.n_rows; ++row) {
        table.add_f32(out + row * output.out_stride, output.bias + column, n_cols);
      }
    }
  });
}

Activations8 quantize_rows(const KernelTable& table, MatView<const float> rows, uint8_t* packed) {
  const Activations8 result{packed, activation_tile_rows(table, rows.rows), rows.cols};
  parallel_for(ceil_div(rows.rows, result.tile_rows), [&](size_t tile, size_t) {
    const size_t first = tile * result.tile_rows, n_rows = std::min(result.tile_rows, rows.rows - first);
    table.quantize_q8p_f32(packed + tile * result.tile_bytes(), rows.row(first), rows.stride, n_rows,
                           result.tile_rows, rows.cols);
  });
  return result;
}

}  // namespace edgeh2o
