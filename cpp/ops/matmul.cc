#include "ops/matmul.h"

#include <algorithm>

#include "base/check.h"
#include "base/cpu_features.h"
#include "base/parallel.h"

namespace edgeh2o {
namespace {

// Depth of a weight panel that is unpacked at a time: 768 x 32 outputs of unpacked 4-bit weights are 28 KB
// and stay in a 32 KB L1 cache; a float panel of 256 x 32 is 32 KB. Multiples of 256 (two-level headers).
constexpr size_t kDepthQ = 3 * kSuperBlock, kDepthF32 = 256;
// Rows that share an unpacked panel: the more, the cheaper the unpacking; 192 x 1,536 8-bit activations are
// 0.4 MB.
constexpr size_t kRowBlock = 192;
// Of which a product has at least as many.
constexpr size_t kTasksPerThread = 2;

// Heads whose products go together.
constexpr size_t kHeadsAtOnce = 64;

// Weights with updates, of one input, whose updates go together: queries, keys, values and a gate.
constexpr size_t kUpdatesAtOnce = 4;
// First halves of updates that share a product.
constexpr size_t kDownAtOnce = 16;

struct Task {
  const MatmulOutput* output;
  size_t panel, n_panels, first_row, n_rows;
  size_t n_cols(size_t panel_cols) const {
    return std::min(n_panels * panel_cols, output->weight->rows() - panel * panel_cols);
  }
};

// Work items are ordered by row block, then output, then panel, so that threads share a row block in their
// caches.
class TaskGrid {
 public:
  TaskGrid(Span<const MatmulOutput> outputs, size_t n_rows, size_t row_block)
      : outputs_(outputs), n_rows_(n_rows), row_block_(row_block) {
    for (const MatmulOutput& output : outputs) panels_ += output.weight->n_panels();
  }
  size_t size() const { return panels_ * ceil_div(n_rows_, row_block_); }
  // Item i and those after it, fewer than max_items in all, that are neighbours in the same matrix.
  Task task(size_t i, size_t max_items) const {
    const size_t first_row = i / panels_ * row_block_;
    size_t panel = i % panels_;
    const MatmulOutput* output = outputs_.begin();
    while (panel >= output->weight->n_panels()) panel -= output++->weight->n_panels();
    return {output, panel, std::min(max_items, output->weight->n_panels() - panel), first_row,
            std::min(row_block_, n_rows_ - first_row)};
  }

 private:
  Span<const MatmulOutput> outputs_;
  size_t n_rows_, row_block_, panels_ = 0;
};

// Few rows are bound by reading the weights: they take the matrix-vector kernels, which unpack a panel in
// registers for every tile of rows; with more rows it is cheaper to unpack it once.
bool is_few_rows(const KernelTable& table, size_t n_rows) { return n_rows <= table.layout.few_rows; }

// Rows of each of the fewest tiles of at most max_rows.
size_t even_share(size_t n_rows, size_t max_rows) { return ceil_div(n_rows, ceil_div(n_rows, max_rows)); }

// A matrix of few panels goes by fewer rows at a time, so that all threads have work: a router, or the first
// half of a low-rank update.
size_t row_block(const KernelTable& table, Span<const MatmulOutput> outputs, size_t n_rows) {
  const size_t tile_rows = table.layout.tile_rows,
               wanted = kTasksPerThread * static_cast<size_t>(num_threads());
  size_t n_panels = 0;
  for (const MatmulOutput& output : outputs) n_panels += output.weight->n_panels();
  const size_t most = round_up(kRowBlock, tile_rows);
  if (n_panels * ceil_div(n_rows, most) >= wanted) return most;
  return std::min(most, round_up(ceil_div(n_rows, ceil_div(wanted, n_panels)), tile_rows));
}

// Several tiles read one part of a panel after another, while it is in the L1 cache.
void run_few_rows(const KernelTable& table, const MatmulInput& input, const Task& task, float* out) {
  const PackedMatrix& weight = *task.output->weight;
  const bool is_quantised = weight.is_quantised();
  const size_t tile_rows =
      is_quantised ? input.packed.tile_rows : even_share(task.n_rows, table.layout.float_vector_rows);
  const size_t depth = weight.cols();
  const bool is_one_tile = task.n_rows <= tile_rows;
  const size_t step = is_one_tile ? depth : is_quantised ? kDepthQ : kDepthF32;
  // A float kernel hides its latency by several panels.
  const size_t n_at_once = is_one_tile && !is_quantised ? task.n_panels : 1;
  const size_t stride = task.output->out_stride, nr = table.layout.panel_cols, ahead = weights_ahead();
  for (size_t panel = 0; panel < task.n_panels; panel += n_at_once) {
    const size_t n_cols = std::min(n_at_once * nr, task.n_cols(nr) - panel * nr);
    for (size_t k = 0; k < depth; k += step) {
      const uint8_t* w = weight.panel_at(task.panel + panel, k);
      const size_t count = std::min(step, depth - k);
      const bool accumulate = task.output->accumulate || k > 0;
      for (size_t row = 0; row < task.n_rows; row += tile_rows) {
        const size_t n_rows = std::min(tile_rows, task.n_rows - row);
        float* y = out + row * stride + panel * nr;
        if (is_quantised) {
          table.gemv_f32_q8_qp(weight.format(), y, stride, input.packed.record(row / tile_rows, k), tile_rows,
                               w, count / kBlock, n_rows, n_cols, accumulate, ahead);
        } else {
          table.gemv_f32_f32_fp(weight.format(), y, stride, input.rows.row(task.first_row + row) + k,
                                input.rows.stride, w, weight.panel_bytes(), count, n_rows, n_cols, accumulate,
                                ahead);
        }
      }
    }
  }
}

// One panel times a block of rows.
void run_matrix(const KernelTable& table, const MatmulInput& input, const Task& task, float* out,
                uint8_t* scratch) {
  const PackedMatrix& weight = *task.output->weight;
  const size_t n_cols = task.n_cols(table.layout.panel_cols);
  const size_t depth = weight.cols(), step = weight.is_quantised() ? kDepthQ : kDepthF32;
  for (size_t k = 0; k < depth; k += step) {
    const size_t count = std::min(step, depth - k);
    const bool accumulate = task.output->accumulate || k > 0;
    const uint8_t* panel = weight.panel_at(task.panel, k);
    if (weight.is_quantised()) {
      const Activations8& x = input.packed;
      table.unpack_q_qp(weight.format(), scratch, panel, count / kBlock, weights_ahead());
      table.gemm_f32_q8_qp(weight.format(), out, task.output->out_stride,
                           x.record(task.first_row / x.tile_rows, k), x.tile_bytes(), scratch, count / kBlock,
                           task.n_rows, n_cols, accumulate);
    } else {
      float* unpacked = reinterpret_cast<float*>(scratch);
      table.unpack_f32_fp(weight.format(), unpacked, panel, count);
      table.gemm_f32_f32_f32p(out, task.output->out_stride, input.rows.row(task.first_row) + k,
                              input.rows.stride, unpacked, table.layout.panel_cols, task.n_rows, n_cols,
                              count, accumulate);
    }
  }
}

// What the updates of at most kUpdatesAtOnce outputs add: z = s * (x A^T) of every adapter that counts, and
// out += z B^T, each part of which follows that of the weight, while the output is in the cache.
class Updates {
 public:
  Updates(const KernelTable& table, const MatmulInput& input, Span<const MatmulOutput> outputs,
          const MatmulContext& context)
      : outputs_(outputs), n_rows_(input.rows.rows), adapters_(context.adapters) {
    MatmulOutput down[kDownAtOnce];
    size_t count = 0;
    const auto multiply = [&] {
      if (count > 0) matmul(table, input, {down, count}, {context.scratch, {}});
      count = 0;
    };
    float* next = reinterpret_cast<float*>(context.scratch + num_threads() * matmul_scratch_bytes(table));
    for (size_t i = 0; i < outputs.size; ++i) {
      inner_[i] = next;
      next = for_each(i, [&](const LowRankUpdate& update, float* inner) {
        EH2O_DASSERT((outputs.data[i].input ? outputs.data[i].input : &input)->rows.data);
        down[count++] = {&update.a, nullptr, inner, update.a.rows(), false, outputs.data[i].input};
        if (count == kDownAtOnce) multiply();
      });
    }
    multiply();
    for (size_t i = 0; i < outputs.size; ++i) {
      for_each(i, [&](const LowRankUpdate& update, float* inner) {
        const size_t rank = update.a.rows();
        for (size_t row = 0; row < n_rows_; ++row, inner += rank) {
          const float scale = adapters_.of(row, update.adapter);
          if (scale != 0.0f && scale != 1.0f) table.scale_f32(inner, inner, scale, rank);
        }
      });
    }
  }

  // Calls run_part(input, task) for what is added to a task's output, whose rows are counted likewise.
  template <typename F>
  void add(const Task& task, const F& run_part) const {
    for_each(static_cast<size_t>(task.output - outputs_.begin()),
             [&](const LowRankUpdate& update, float* inner) {
               const size_t rank = update.a.rows(), end = task.first_row + task.n_rows;
               const MatmulInput input{{}, {inner, n_rows_, rank, rank}};
               const MatmulOutput up{&update.b, nullptr, task.output->out, task.output->out_stride, true};
               // Rows in which it does not count stay as they are.
               for (size_t row = task.first_row, first = row; row < end; first = row) {
                 const bool counts = adapters_.of(row, update.adapter) != 0.0f;
                 row = adapters_.rows ? row + 1 : end;
                 while (row < end && (adapters_.of(row, update.adapter) != 0.0f) == counts) ++row;
                 if (counts) run_part(input, {&up, task.panel, task.n_panels, first, row - first});
               }
             });
  }

 private:
  // Calls f(update, z) for the updates of an output that count in a row; where the z of the next begins.
  template <typename F>
  float* for_each(size_t i, const F& f) const {
    float* inner = inner_[i];
    const LowRankUpdates* updates = adapters_.any() ? outputs_.data[i].weight->updates() : nullptr;
    if (!updates) return inner;
    for (const LowRankUpdate& update : *updates) {
      size_t row = 0;
      const size_t n_rows = adapters_.rows ? n_rows_ : 1;
      while (row < n_rows && adapters_.of(row, update.adapter) == 0.0f) ++row;
      if (row == n_rows) continue;
      f(update, inner);
      inner += n_rows_ * update.a.rows();
    }
    return inner;
  }

  Span<const MatmulOutput> outputs_;
  size_t n_rows_;
  AdapterScales adapters_;
  float* inner_[kUpdatesAtOnce];
};

}  // namespace

size_t update_scratch_bytes(size_t n_rows, size_t rank) {
  return kUpdatesAtOnce * n_rows * rank * sizeof(float);
}

size_t Activations8::bytes(const KernelTable& table, size_t n_rows, size_t depth) {
  const PackLayout& layout = table.layout;
  const size_t padded = std::max(round_up(n_rows, layout.tile_rows), round_up(n_rows, layout.vector_rows));
  return padded * ceil_div(depth, kBlock) * kActivationRecordPerRow;
}

size_t activation_tile_rows(const KernelTable& table, size_t n_rows) {
  if (!is_few_rows(table, n_rows)) return table.layout.tile_rows;
  // To unpack the weights for a tile costs about as much as two rows.
  size_t best = 0, least = SIZE_MAX;
  for (size_t rows = 1; rows <= table.layout.vector_rows; ++rows) {
    const size_t cost = ceil_div(n_rows, rows) * (rows + 2);
    if (vector_tile_rows(rows) == rows && cost < least) best = rows, least = cost;
  }
  return best;
}

size_t matmul_scratch_bytes(const KernelTable& table) {
  const size_t per_column =
      std::max(kDepthQ / kSuperBlock * max_unpacked_super_per_column(), kDepthF32 * sizeof(float));
  return round_up(per_column * table.layout.panel_cols, kAlignment);
}

void matmul(const KernelTable& table, const MatmulInput& input, Span<const MatmulOutput> outputs,
            const MatmulContext& context) {
  for (const MatmulOutput& output : outputs) {
    const MatmulInput& own = output.input ? *output.input : input;
    const size_t n_columns = own.rows.cols;
    EH2O_DASSERT(!output.weight->is_quantised() ||
                 own.packed.scale_block >= table.layout.scale_block(output.weight->format()));
    EH2O_CHECK(output.weight->cols() == n_columns, "matmul: activations have ", n_columns,
               " columns, the weight has ", output.weight->cols());
  }
  const auto may_update = [](const MatmulOutput& output) { return output.weight->updates() != nullptr; };
  const bool has_updates = context.adapters.any() && std::any_of(outputs.begin(), outputs.end(), may_update);
  if (has_updates && outputs.size > kUpdatesAtOnce) {
    for (size_t i = 0; i < outputs.size; i += kUpdatesAtOnce) {
      matmul(table, input, {outputs.data + i, std::min(kUpdatesAtOnce, outputs.size - i)}, context);
    }
    return;
  }
  const Updates updates(table, input, has_updates ? outputs : Span<const MatmulOutput>{outputs.data, 0},
                        context);
  const size_t n_rows = input.rows.rows;
  const size_t nr = table.layout.panel_cols;
  const bool is_few = is_few_rows(table, n_rows);
  const TaskGrid grid(outputs, n_rows, is_few ? n_rows : row_block(table, outputs, n_rows));
  const auto run = [&](size_t first, size_t end, size_t thread) {
    for (size_t i = first; i < end;) {
      const Task task = grid.task(i, is_few ? end - i : 1);
      const MatmulOutput& output = *task.output;
      const MatmulInput& own = output.input ? *output.input : input;
      const size_t column = task.panel * nr;
      float* out = output.out + task.first_row * output.out_stride + column;
      const auto run_part = [&](const MatmulInput& x, const Task& part) {
        float* const y = out + (part.first_row - task.first_row) * output.out_stride;
        if (is_few) {
          run_few_rows(table, x, part, y);
        } else {
          run_matrix(table, x, part, y, context.scratch + thread * matmul_scratch_bytes(table));
        }
      };
      run_part(own, task);
      for (size_t row = 0; output.bias && row < task.n_rows; ++row) {
        table.add_f32(out + row * output.out_stride, output.bias + column, task.n_cols(nr));
      }
      if (has_updates) updates.add(task, run_part);
      i += task.n_panels;
    }
  };
  if (is_few) {  // panels too short for a task each
    parallel_ranges(grid.size(), run);
  } else {
    parallel_for(grid.size(), [&](size_t i, size_t thread) { run(i, i + 1, thread); });
  }
}

void matmul_heads(const KernelTable& table, MatView<const float> rows, uint8_t* packed, size_t step,
                  Span<const PackedMatrix> weights, float* out, size_t out_stride, size_t out_step,
                  const MatmulContext& context) {
  const size_t depth = weights.data[0].cols();
  EH2O_CHECK(depth <= step && weights.size * step <= rows.cols, "matmul_heads: ", weights.size, " heads of ",
             depth, " values, ", step, " apart, in rows of ", rows.cols);
  const PackedOut packed_out = packed_for(table, packed, {&weights.data[0]}, false);
  Activations8 all{packed_out.packed, activation_tile_rows(table, rows.rows), depth, packed_out.scale_block};
  const size_t n_tiles = ceil_div(rows.rows, all.tile_rows);
  if (all.packed) {
    parallel_for(weights.size * n_tiles, [&](size_t i, size_t) {
      const size_t column = i / n_tiles * step, first = i % n_tiles * all.tile_rows;
      table.quantize_q8p_f32(all.packed + i * all.tile_bytes(), rows.row(first) + column, rows.stride,
                             std::min(all.tile_rows, rows.rows - first), all.tile_rows, depth,
                             all.scale_block);
    });
  }
  MatmulInput inputs[kHeadsAtOnce];
  MatmulOutput outputs[kHeadsAtOnce];
  for (size_t first = 0; first < weights.size; first += kHeadsAtOnce) {
    const size_t count = std::min(kHeadsAtOnce, weights.size - first);
    for (size_t i = 0; i < count; ++i) {
      const size_t head = first + i;
      inputs[i] = {all, {rows.data + head * step, rows.rows, depth, rows.stride}};
      if (all.packed) inputs[i].packed.packed += head * n_tiles * all.tile_bytes();
      outputs[i] = {&weights.data[head], nullptr, out + head * out_step, out_stride, false, inputs + i};
    }
    matmul(table, inputs[0], {outputs, count}, context);
  }
}

void PackedOut::add(const KernelTable& table, uint8_t* buffer, const PackedMatrix& weight,
                    bool has_adapters) {
  needs_floats |= !weight.is_quantised() || (has_adapters && weight.updates());
  if (!weight.is_quantised()) return;
  packed = buffer;
  scale_block = std::max(scale_block, table.layout.scale_block(weight.format()));
}

PackedOut packed_for(const KernelTable& table, uint8_t* buffer,
                     std::initializer_list<const PackedMatrix*> weights, bool has_adapters) {
  PackedOut out;
  for (const PackedMatrix* weight : weights) out.add(table, buffer, *weight, has_adapters);
  return out;
}

Activations8 quantize_rows(const KernelTable& table, MatView<const float> rows, const PackedOut& out) {
  const Activations8 result{out.packed, activation_tile_rows(table, rows.rows), rows.cols, out.scale_block};
  parallel_for(ceil_div(rows.rows, result.tile_rows), [&](size_t tile, size_t) {
    const size_t first = tile * result.tile_rows, n_rows = std::min(result.tile_rows, rows.rows - first);
    table.quantize_q8p_f32(out.packed + tile * result.tile_bytes(), rows.row(first), rows.stride, n_rows,
                           result.tile_rows, rows.cols, out.scale_block);
  });
  return result;
}

}  // namespace edgeh2o
