#include "bindings/python_policy.h"

#include <pybind11/numpy.h>

#include <algorithm>

#include "base/check.h"
#include "bindings/buffers.h"

namespace py = pybind11;

namespace edgeh2o {
namespace {

using PositionArray = py::array_t<int64_t, py::array::c_style | py::array::forcecast>;

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

// Raises edgeh2o.errors.UsageError; needs the GIL.
[[noreturn]] void throw_usage_error(const std::string& message, py::error_already_set* cause = nullptr) {
  const py::object type = py::module_::import("edgeh2o.errors").attr("UsageError");
  if (cause) {
    py::raise_from(*cause, type.ptr(), message.c_str());
  } else {
    py::set_error(type, message.c_str());
  }
  throw py::error_already_set();
}

// As the last lines of a traceback: type and message.
std::string describe_exception(const py::error_already_set& error) {
  const py::object lines = py::module_::import("traceback").attr("format_exception_only")(error.value());
  return py::str(py::str("").attr("join")(lines).attr("strip")());
}

std::vector<int32_t> copy_positions(const py::object& selection, size_t end) {
  const py::array array(selection);
  const bool is_integer = array.dtype().kind() == 'i' || array.dtype().kind() == 'u';
  EH2O_CHECK(array.ndim() == 1 && (is_integer || array.size() == 0),
             "positions must be a one-dimensional array of integers (of a mask: np.flatnonzero(mask)), got ",
             Py_TYPE(selection.ptr())->tp_name, " (", std::string(py::str(array.dtype())), ", shape ",
             std::string(py::str(array.attr("shape"))), ")");
  const PositionArray positions(array);
  for (py::ssize_t i = 0; i < positions.size(); ++i) {
    const int64_t position = positions.data()[i];
    EH2O_CHECK(position >= 0 && static_cast<size_t>(position) < end, "position ", position,
               " is not before the chunk, which begins at ", end);
    EH2O_CHECK(i == 0 || position > positions.data()[i - 1], "position ", position, " after ",
               positions.data()[i - 1], ": positions must ascend, each once");
  }
  return {positions.data(), positions.data() + positions.size()};
}

MemorySet listed(const std::vector<int32_t>& positions) {
  static constexpr int32_t kNoPosition = 0;  // an empty list is not a range
  return MemorySet::list(positions.empty() ? &kNoPosition : positions.data(), positions.size());
}

// Rows [n_rows][head_dim]; without rows any empty array will do.
std::vector<float> copy_synthetic(const py::object& rows, size_t n_rows, size_t head_dim) {
  const FloatArray array(rows);
  const bool has_shape = array.ndim() == 2 && static_cast<size_t>(array.shape(0)) == n_rows &&
                         static_cast<size_t>(array.shape(1)) == head_dim;
  EH2O_CHECK(has_shape || n_rows + array.size() == 0, "synthetic keys and values must be [", n_rows, "][",
             head_dim, "] like their biases, got shape ", std::string(py::str(array.attr("shape"))));
  return {array.data(), array.data() + array.size()};
}

}  // namespace

PythonPolicy::PythonPolicy(py::object rule, PolicyNeeds needs)
    : rule_(std::move(rule)), needs_(needs), selects_in_decode_(py::hasattr(rule_, "select_decode")) {
  needs_.ends_prompts = needs_.ends_by_scores = py::hasattr(rule_, "end_prompt");
  if (py::hasattr(rule_, "select_memory")) return;
  throw_usage_error("a rule needs a method select_memory, which " +
                    std::string(Py_TYPE(rule_.ptr())->tp_name) + " lacks");
}

void PythonPolicy::allocate(const PolicyShape& shape) { slots_.assign(shape.n_slots(), SlotState{}); }

// Runs f(method) with the GIL if the rule has the method. What it throws is kept for end_layer, as a
// UsageError unless it is KeyboardInterrupt or the like.
template <typename F>
void PythonPolicy::call_python(const char* method, std::optional<size_t> slot, const F& f) {
  const auto message = [&](const std::string& cause) {
    std::string place;
    if (slot) {
      place = " (layer " + std::to_string(shape().slots[*slot].layer) + ", KV head " +
              std::to_string(shape().slots[*slot].index) + ")";
    }
    return std::string(method) + " of the rule in Python" + place + ": " + cause;
  };
  try {
    const py::gil_scoped_acquire acquire;
    try {
      if (py::hasattr(rule_, method)) f(rule_.attr(method));
    } catch (py::error_already_set& error) {
      if (!error.matches(PyExc_Exception)) throw;
      throw_usage_error(message(describe_exception(error)), &error);
    } catch (const std::invalid_argument& error) {
      throw_usage_error(message(error.what()));
    }
  } catch (...) {
    const std::lock_guard<std::mutex> lock(error_mutex_);
    if (!error_) error_ = std::current_exception();
  }
}

void PythonPolicy::begin_prompt() {
  call_python("begin_prompt", std::nullopt, [](const py::object& method) { method(); });
  for (size_t slot = 0; slot < slots_.size(); ++slot) {
    slots_[slot] = SlotState{};
    call_python("is_scored", slot, [&](const py::object& method) {
      slots_[slot].is_scored = py::bool_(method(shape().slots[slot].layer, shape().slots[slot].index));
    });
  }
}

MemorySet PythonPolicy::select_memory(size_t slot, const SelectionInput& input) {
  SlotState& state = slots_[slot];
  state.memory = Selection{};
  call_python("select_memory", slot, [&](const py::object& method) {
    Selection chosen = read_selection(ask(method, slot, input), input);
    const bool is_scored = state.is_scored && needs_.column_sums != ColumnSums::kNone;
    EH2O_CHECK(!is_scored || chosen.positions.size() <= needs_.max_scored_memory, "a memory set of ",
               chosen.positions.size(), " positions exceeds max_memory = ", needs_.max_scored_memory);
    EH2O_CHECK(chosen.biases.size() <= needs_.max_synthetic, chosen.biases.size(),
               " synthetic rows exceed max_synthetic = ", needs_.max_synthetic);
    state.memory = std::move(chosen);
  });
  return memory(slot);
}

MemorySet PythonPolicy::end_prompt(size_t slot, const SelectionInput& input) {
  Selection& chosen = slots_[slot].prompt;
  chosen = Selection{};
  const SlotShape& head = shape().slots[slot];
  const size_t n_tokens = input.chunk.begin;
  call_python("end_prompt", slot, [&](const py::object& method) {
    Selection read =
        read_selection(method(head.layer, head.index, n_tokens, copy_rows(input, input.past_keys, n_tokens),
                              copy_rows(input, input.past_values, n_tokens)),
                       input);
    EH2O_CHECK(read.positions.size() + read.biases.size() <= n_tokens, read.positions.size(),
               " positions and ", read.biases.size(), " synthetic rows are more than the ", n_tokens,
               " tokens of the prompt");
    chosen = std::move(read);
  });
  return chosen.set();
}

MemorySet PythonPolicy::select_decode(size_t slot, const SelectionInput& input) {
  std::vector<int32_t>& positions = slots_[slot].decode_positions;
  positions.clear();
  call_python("select_decode", slot, [&](const py::object& method) {
    positions = copy_positions(ask(method, slot, input), input.chunk.begin);
  });
  return listed(positions);
}

// What a choice of the rule gives.
py::object PythonPolicy::ask(const py::object& method, size_t slot, const SelectionInput& input) const {
  const SlotShape& head = shape().slots[slot];
  const size_t n_past = input.chunk.begin;
  return method(head.layer, head.index, chunk_tuple(input.chunk), copy_queries(input, head.group_size),
                copy_rows(input, input.past_keys, n_past), copy_rows(input, input.past_values, n_past));
}

PythonPolicy::Selection PythonPolicy::read_selection(const py::object& answer, const SelectionInput& input) {
  Selection result;
  if (py::isinstance<py::tuple>(answer)) {
    const auto parts = answer.cast<py::tuple>();
    EH2O_CHECK(parts.size() == 4, "a tuple is (positions, keys, values, biases), got ", parts.size(),
               " items");
    result.positions = copy_positions(parts[0], input.chunk.begin);
    const auto biases = FloatArray(py::object(parts[3]));
    result.biases.assign(biases.data(), biases.data() + biases.size());
    result.keys = copy_synthetic(parts[1], result.biases.size(), input.past_keys.head_dim);
    result.values = copy_synthetic(parts[2], result.biases.size(), input.past_values.head_dim);
  } else {
    result.positions = copy_positions(answer, input.chunk.begin);
  }
  return result;
}

MemorySet PythonPolicy::Selection::set() const {
  MemorySet result = listed(positions);
  result.synthetic = {keys.data(), values.data(), biases.data(), biases.size()};
  return result;
}

void PythonPolicy::observe_intra(size_t slot, PositionRange chunk, Span<const float> sums) {
  call_python("observe_intra", slot, [&](const py::object& method) {
    method(shape().slots[slot].layer, shape().slots[slot].index, chunk_tuple(chunk),
           py::array_t<float>(static_cast<py::ssize_t>(sums.size), sums.data));
  });
}

void PythonPolicy::observe_memory(size_t slot, PositionRange chunk, const MemorySet& memory,
                                  Span<const float> sums) {
  call_python("observe_memory", slot, [&](const py::object& method) {
    method(shape().slots[slot].layer, shape().slots[slot].index, chunk_tuple(chunk),
           py::array_t<int32_t>(static_cast<py::ssize_t>(memory.n_listed), memory.positions),
           py::array_t<float>(static_cast<py::ssize_t>(sums.size), sums.data));
  });
}

void PythonPolicy::evict(size_t slot, const EvictionInput& input, int32_t* dropped) {
  drop_lowest(input, dropped);  // what a rule without the method leaves to the default
  call_python("evict", slot, [&](const py::object& method) {
    const std::vector<int32_t> positions = copy_positions(
        method(shape().slots[slot].layer, shape().slots[slot].index, input.n_dropped,
               py::array_t<float>(static_cast<py::ssize_t>(input.scores.size), input.scores.data)),
        input.scores.size);
    EH2O_CHECK(positions.size() == input.n_dropped, positions.size(), " positions were given, ",
               input.n_dropped, " are to be dropped");
    std::copy(positions.begin(), positions.end(), dropped);
  });
}

void PythonPolicy::end_layer() {
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

MemorySet PythonPolicy::memory(size_t slot) const { return slots_[slot].memory.set(); }

}  // namespace edgeh2o
