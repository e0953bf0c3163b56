#include "bindings/python_policy.h"

#include <pybind11/numpy.h>

#include <algorithm>

#include "base/check.h"

namespace py = pybind11;

namespace edgeh2o {
namespace {

using FloatArray = py::array_t<float, py::array::c_style | py::array::forcecast>;
using PositionArray = py::array_t<int32_t, py::array::c_style | py::array::forcecast>;

py::tuple chunk_tuple(PositionRange chunk) { return py::make_tuple(chunk.begin, chunk.end); }

// In the cache's own type where NumPy has it, else in float32.
py::array copy_rows(const SelectionInput& input, const KvRows& rows, size_t n_rows) {
  if (rows.type != CacheType::kQ8_0) {
    const py::dtype type(rows.type == CacheType::kF16 ? "float16" : "float32");
    return py::array(type, {n_rows, rows.head_dim}, rows.data);
  }
  py::array_t<float> values({n_rows, rows.head_dim});
  float* out = values.mutable_data();
  std::fill_n(out, n_rows * rows.head_dim, 0.0f);
  for (size_t i = 0; i < n_rows; ++i) {
    input.add_kv_rows(rows.type, out + i * rows.head_dim, rows.row(i), nullptr, 1, rows.head_dim);
  }
  return values;
}

py::array copy_queries(const SelectionInput& input, size_t group_size) {
  const MatView<const float>& q = input.queries;
  const size_t head_dim = q.cols / group_size, item = sizeof(float);
  return py::array(py::dtype::of<float>(), {q.rows, group_size, head_dim},
                   {q.stride * item, head_dim * item, item}, q.data);
}

template <typename T>
void assign(std::vector<T>& out, const py::array_t<T, py::array::c_style | py::array::forcecast>& array) {
  out.assign(array.data(), array.data() + array.size());
}

}  // namespace

void PythonPolicy::allocate(const PolicyShape& shape) { slots_.assign(shape.n_slots(), SlotState{}); }

// Runs f(method) with the GIL if the rule has the method; keeps what it throws for end_layer.
template <typename F>
void PythonPolicy::call_python(const char* method, const F& f) {
  try {
    const py::gil_scoped_acquire acquire;
    if (py::hasattr(rule_, method)) f(rule_.attr(method));
  } catch (...) {
    const std::lock_guard<std::mutex> lock(error_mutex_);
    if (!error_) error_ = std::current_exception();
  }
}

void PythonPolicy::begin_prompt() {
  call_python("begin_prompt", [](const py::object& method) { method(); });
  for (size_t slot = 0; slot < slots_.size(); ++slot) {
    slots_[slot] = SlotState{};
    call_python("is_scored", [&](const py::object& method) {
      slots_[slot].is_scored = method(slot / shape().n_kv_heads, slot % shape().n_kv_heads).cast<bool>();
    });
  }
}

MemorySet PythonPolicy::select_memory(size_t slot, const SelectionInput& input) {
  SlotState& state = slots_[slot];
  state.positions.clear();
  state.keys.clear();
  state.values.clear();
  state.biases.clear();
  call_python("select_memory", [&](const py::object& method) {
    const size_t n_past = input.chunk.begin;
    const py::object selection =
        method(slot / shape().n_kv_heads, slot % shape().n_kv_heads, chunk_tuple(input.chunk),
               copy_queries(input, shape().group_size), copy_rows(input, input.past_keys, n_past),
               copy_rows(input, input.past_values, n_past));
    SlotState chosen;
    chosen.is_scored = state.is_scored;
    store_selection(chosen, selection, input);
    state = std::move(chosen);
  });
  return memory(slot);
}

void PythonPolicy::store_selection(SlotState& state, const py::object& selection,
                                   const SelectionInput& input) const {
  if (py::isinstance<py::tuple>(selection)) {
    const auto parts = selection.cast<py::tuple>();
    EH2O_CHECK(parts.size() == 4,
               "select_memory must return positions or (positions, keys, values, biases), got ", parts.size(),
               " items");
    assign(state.positions, parts[0].cast<PositionArray>());
    assign(state.keys, parts[1].cast<FloatArray>());
    assign(state.values, parts[2].cast<FloatArray>());
    assign(state.biases, parts[3].cast<FloatArray>());
  } else {
    assign(state.positions, selection.cast<PositionArray>());
  }
  check_positions({state.positions.data(), state.positions.size()}, input.chunk.begin);
  const bool is_scored = state.is_scored && needs_.column_sums != ColumnSums::kNone;
  EH2O_CHECK(!is_scored || state.positions.size() <= needs_.max_scored_memory, "a memory set of ",
             state.positions.size(), " positions exceeds max_memory = ", needs_.max_scored_memory);
  const size_t n_synthetic = state.biases.size(), n_floats = n_synthetic * shape().head_dim;
  EH2O_CHECK(n_synthetic <= needs_.max_synthetic, n_synthetic,
             " synthetic rows exceed max_synthetic = ", needs_.max_synthetic);
  EH2O_CHECK(state.keys.size() == n_floats && state.values.size() == n_floats,
             "synthetic keys and values must be [", n_synthetic, "][", shape().head_dim,
             "] like their biases");
}

void PythonPolicy::observe_intra(size_t slot, PositionRange chunk, Span<const float> sums) {
  call_python("observe_intra", [&](const py::object& method) {
    method(slot / shape().n_kv_heads, slot % shape().n_kv_heads, chunk_tuple(chunk),
           py::array_t<float>(static_cast<py::ssize_t>(sums.size), sums.data));
  });
}

void PythonPolicy::observe_memory(size_t slot, PositionRange chunk, const MemorySet& memory,
                                  Span<const float> sums) {
  call_python("observe_memory", [&](const py::object& method) {
    method(slot / shape().n_kv_heads, slot % shape().n_kv_heads, chunk_tuple(chunk),
           py::array_t<int32_t>(static_cast<py::ssize_t>(memory.n_listed), memory.positions),
           py::array_t<float>(static_cast<py::ssize_t>(sums.size), sums.data));
  });
}

void PythonPolicy::end_layer() {
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

MemorySet PythonPolicy::memory(size_t slot) const {
  static constexpr int32_t kNoPosition = 0;  // an empty list is not a range
  const SlotState& state = slots_[slot];
  MemorySet set = MemorySet::list(state.positions.empty() ? &kNoPosition : state.positions.data(),
                                  state.positions.size());
  set.synthetic = {state.keys.data(), state.values.data(), state.biases.data(), state.biases.size()};
  return set;
}

}  // namespace edgeh2o
