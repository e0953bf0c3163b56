// The attention core on its own, for other runtimes: policies, a KV cache, and chunked attention over it.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <vector>

#include "base/check.h"
#include "bindings/python_policy.h"
#include "bindings/register.h"
#include "isa/select.h"
#include "model/kv_cache.h"
#include "ops/chunked_attention.h"
#include "sparse/dense_policy.h"
#include "sparse/h2o_policy.h"
#include "sparse/headwise_policy.h"

namespace py = pybind11;

namespace edgeh2o {
namespace {

using FloatArray = py::array_t<float, py::array::c_style | py::array::forcecast>;
using PolicyPtr = std::shared_ptr<SparsePolicy>;

size_t checked_slot(const SparsePolicy& policy, size_t layer, size_t kv_head) {
  const PolicyShape& shape = policy.shape();
  EH2O_CHECK(shape.n_slots() > 0, "this policy serves no session yet");
  EH2O_CHECK(layer < shape.n_layers && kv_head < shape.n_kv_heads, "layer ", layer, ", KV head ", kv_head,
             " does not exist; there are ", shape.n_layers, " layers of ", shape.n_kv_heads);
  return shape.slot(layer, kv_head);
}

py::array_t<int32_t> memory_set(const SparsePolicy& policy, size_t layer, size_t kv_head) {
  const MemorySet memory = policy.memory(checked_slot(policy, layer, kv_head));
  py::array_t<int32_t> positions(static_cast<py::ssize_t>(memory.n_positions()));
  int32_t* out = positions.mutable_data();
  for (size_t i = 0; i < memory.n_positions(); ++i) {
    out[i] = memory.positions ? memory.positions[i] : static_cast<int32_t>(memory.range.begin + i);
  }
  return positions;
}

py::array_t<float> scores(const SparsePolicy& policy, size_t layer, size_t kv_head, std::optional<size_t> n) {
  const Span<const float> all = policy.scores(checked_slot(policy, layer, kv_head));
  EH2O_CHECK(all.size > 0, "the policy (", policy.describe(), ") keeps no scores");
  const size_t count = n.value_or(all.size);
  EH2O_CHECK(count <= all.size, "asked for the scores of ", count, " positions, there are ", all.size);
  return py::array_t<float>(static_cast<py::ssize_t>(count), all.data);
}

PolicyPtr make_h2o_policy(size_t local, size_t heavy, size_t sinks, const std::string& score, size_t window,
                          float decay, bool by_values) {
  static constexpr std::pair<const char*, H2OScore> kScores[] = {{"sum", H2OScore::kSum},
                                                                 {"mean", H2OScore::kMean},
                                                                 {"lift", H2OScore::kLift},
                                                                 {"window", H2OScore::kWindow}};
  const auto found =
      std::find_if(std::begin(kScores), std::end(kScores), [&](auto& item) { return score == item.first; });
  EH2O_CHECK(found != std::end(kScores), "score = '", score, "'; it is one of sum, mean, lift, window");
  H2OOptions options;
  options.n_local = local;
  options.n_heavy = heavy;
  options.n_sinks = sinks;
  options.score = found->second;
  options.n_window = window;
  options.decay = decay;
  options.by_values = by_values;
  return std::make_shared<H2OPolicy>(options);
}

PolicyPtr make_headwise_policy(const std::vector<std::optional<size_t>>& budgets, size_t local, size_t sinks,
                               float decay, size_t page_size) {
  HeadwiseOptions options;
  for (const auto& budget : budgets) options.budgets.push_back(budget.value_or(HeadwiseOptions::kFull));
  options.n_local = local;
  options.n_sinks = sinks;
  options.decay = decay;
  options.page_size = page_size;
  return std::make_shared<HeadwisePolicy>(options);
}

PolicyPtr make_python_policy(py::object rule, const std::string& column_sums, size_t max_memory,
                             size_t max_synthetic) {
  EH2O_CHECK(column_sums == "none" || column_sums == "part" || column_sums == "joint", "column_sums = '",
             column_sums, "'; it is one of none, part, joint");
  const ColumnSums sums = column_sums == "part"    ? ColumnSums::kPerPart
                          : column_sums == "joint" ? ColumnSums::kJoint
                                                   : ColumnSums::kNone;
  PolicyNeeds needs;
  needs.column_sums = sums;
  needs.max_scored_memory = max_memory;
  needs.max_synthetic = max_synthetic;
  return std::make_shared<PythonPolicy>(std::move(rule), needs);
}

// A view of [kv_head][position][head_dim] that keeps the cache alive; of q8_0, which NumPy has not, the bytes
// [kv_head][position][row bytes].
py::array cache_view(const std::shared_ptr<KvCache>& cache, size_t layer, bool is_keys) {
  EH2O_CHECK(layer < cache->shape().n_layers, "layer ", layer, " does not exist; the cache has ",
             cache->shape().n_layers);
  const KvCache::Shape& shape = cache->shape();
  const LayerKv kv = cache->view(layer);
  const py::dtype item(shape.type == CacheType::kF16   ? "float16"
                       : shape.type == CacheType::kF32 ? "float32"
                                                       : "uint8");
  const size_t row_bytes = kv_row_bytes(shape.type, shape.head_dim);
  const auto item_bytes = static_cast<size_t>(item.itemsize());
  return py::array(item, {shape.n_kv_heads, shape.max_context, row_bytes / item_bytes},
                   {kv.head_stride, row_bytes, item_bytes}, (is_keys ? kv.k(0) : kv.v(0)).data,
                   py::cast(cache));
}

// Chunked attention with its own cache: what a runtime needs that has no cache of ours.
class AttentionSession {
 public:
  AttentionSession(const PolicyPtr& policy, const AttentionShape& shape, CacheType cache_type)
      : attention_(active_kernel_table(), shape, policy),
        policy_(policy),
        cache_(std::make_shared<KvCache>(
            active_kernel_table(),
            KvCache::Shape{shape.n_layers, shape.n_kv_heads, shape.head_dim, shape.max_context, cache_type})),
        positions_(shape.n_layers, 0) {}

  // q, k, v: [n_tokens][heads][head_dim] of the next tokens of the prompt. If it throws, reset before going
  // on.
  py::array_t<float> run(size_t layer, const FloatArray& q, const FloatArray& k, const FloatArray& v,
                         size_t window, bool is_last) {
    const size_t first = position(layer), n_tokens = append(layer, q, k, v);
    last_output_ = attend(q, [&](MatView<const float> queries, MatView<float> out) {
      attention_.run(layer, queries, cache_->view(layer), first, window, is_last, out);
    });
    positions_[layer] += n_tokens;
    n_rows_ = n_tokens;
    return last_output_;
  }

  py::array_t<float> decode(size_t layer, const FloatArray& q, const FloatArray& k, const FloatArray& v,
                            size_t window) {
    EH2O_CHECK(q.ndim() == 3 && q.shape(0) == 1, "decode takes one token: q [1][n_heads][head_dim]");
    append(layer, q, k, v);
    const py::array_t<float> output = attend(q, [&](MatView<const float> queries, MatView<float> out) {
      attention_.decode(queries, cache_->view(layer), positions_[layer], window, out);
    });
    ++positions_[layer];
    return output;
  }

  void reset() {
    attention_.begin_prompt();
    std::fill(positions_.begin(), positions_.end(), 0);
    n_rows_ = 0;
  }

  // (m, l, o) of the rows of the latest run: [n_tokens][n_heads], and o with [head_dim].
  py::tuple state() const {
    EH2O_CHECK(n_rows_ > 0, "there is no state before the first run");
    const std::vector<size_t> shape{n_rows_, attention_.shape().n_heads};
    py::array_t<float> m(shape), l(shape);
    attention_.read_state(n_rows_, m.mutable_data(), l.mutable_data());
    return py::make_tuple(m, l, last_output_);
  }

  size_t position(size_t layer) const {
    EH2O_CHECK(layer < positions_.size(), "layer ", layer, " does not exist; there are ", positions_.size());
    return positions_[layer];
  }
  const std::shared_ptr<KvCache>& cache() const { return cache_; }
  const PolicyPtr& policy() const { return policy_; }
  uint64_t pairs_computed() const { return attention_.pairs_computed(); }

 private:
  static void check_rows(const FloatArray& rows, const char* name, size_t n_tokens, size_t n_heads,
                         size_t head_dim) {
    EH2O_CHECK(rows.ndim() == 3, name, " must be [n_tokens][heads][head_dim], got ", rows.ndim(),
               " dimensions");
    const auto dim = [&](int i) { return static_cast<size_t>(rows.shape(i)); };
    EH2O_CHECK(dim(0) == n_tokens && dim(1) == n_heads && dim(2) == head_dim, name, " must be [", n_tokens,
               "][", n_heads, "][", head_dim, "], got [", dim(0), "][", dim(1), "][", dim(2), "]");
  }

  // Writes the new rows to the cache; returns how many there are.
  size_t append(size_t layer, const FloatArray& q, const FloatArray& k, const FloatArray& v) {
    const AttentionShape& shape = attention_.shape();
    const size_t first = position(layer), n_tokens = q.ndim() > 0 ? static_cast<size_t>(q.shape(0)) : 0;
    check_rows(q, "q", n_tokens, shape.n_heads, shape.head_dim);
    check_rows(k, "k", n_tokens, shape.n_kv_heads, shape.head_dim);
    check_rows(v, "v", n_tokens, shape.n_kv_heads, shape.head_dim);
    EH2O_CHECK(n_tokens > 0 && n_tokens <= shape.batch_size,
               "a call takes 1 to batch_size = ", shape.batch_size, " tokens, got ", n_tokens);
    const size_t width = shape.n_kv_heads * shape.head_dim;
    cache_->write(layer, first, {k.data(), n_tokens, width, width}, {v.data(), n_tokens, width, width});
    return n_tokens;
  }

  template <typename F>
  py::array_t<float> attend(const FloatArray& q, const F& f) {
    const size_t n_tokens = static_cast<size_t>(q.shape(0));
    const size_t width = attention_.shape().n_heads * attention_.shape().head_dim;
    py::array_t<float> output({q.shape(0), q.shape(1), q.shape(2)});
    const MatView<const float> queries{q.data(), n_tokens, width, width};
    const MatView<float> out{output.mutable_data(), n_tokens, width, width};
    {
      const py::gil_scoped_release release;
      f(queries, out);
    }
    return output;
  }

  ChunkedAttention attention_;
  PolicyPtr policy_;
  std::shared_ptr<KvCache> cache_;
  std::vector<size_t> positions_;  // per layer: tokens in the cache
  size_t n_rows_ = 0;              // tokens of the latest run
  py::array_t<float> last_output_;
};

AttentionShape make_shape(size_t n_heads, size_t n_kv_heads, size_t head_dim, size_t n_layers,
                          size_t chunk_size, size_t batch_size, size_t max_context,
                          std::optional<float> scale, float soft_cap) {
  const float default_scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
  return {n_layers,    n_heads,    n_kv_heads, head_dim,
          max_context, batch_size, chunk_size, scale.value_or(default_scale),
          soft_cap};
}

}  // namespace

void bind_attention(py::module_& module) {
  py::class_<SparsePolicy, PolicyPtr>(module, "SparsePolicy")
      .def("memory_set", &memory_set, py::arg("layer"), py::arg("kv_head"))
      .def("scores", &scores, py::arg("layer"), py::arg("kv_head"), py::arg("n") = py::none())
      .def("__repr__",
           [](const SparsePolicy& policy) { return "<SparsePolicy: " + policy.describe() + ">"; });
  module.def("dense_policy", []() -> PolicyPtr { return std::make_shared<DensePolicy>(); });
  module.def("h2o_policy", &make_h2o_policy, py::arg("local"), py::arg("heavy"), py::kw_only(),
             py::arg("sinks") = 0, py::arg("score") = "sum", py::arg("window") = 64, py::arg("decay") = 1.0f,
             py::arg("by_values") = false);
  module.def("headwise_policy", &make_headwise_policy, py::arg("budgets"), py::kw_only(),
             py::arg("local") = 256, py::arg("sinks") = 4, py::arg("decay") = 0.9f,
             py::arg("page_size") = 64);
  module.def("python_policy", &make_python_policy, py::arg("rule"), py::kw_only(),
             py::arg("column_sums") = "none", py::arg("max_memory") = 0, py::arg("max_synthetic") = 0);

  py::class_<KvCache, std::shared_ptr<KvCache>>(module, "KvCache")
      .def(py::init([](size_t n_layers, size_t n_kv_heads, size_t head_dim, size_t max_context,
                       const std::string& cache_type) {
             return std::make_shared<KvCache>(
                 active_kernel_table(),
                 KvCache::Shape{n_layers, n_kv_heads, head_dim, max_context, parse_cache_type(cache_type)});
           }),
           py::arg("n_layers"), py::arg("n_kv_heads"), py::arg("head_dim"), py::arg("max_context"),
           py::arg("cache_type") = "f16")
      .def(
          "keys",
          [](const std::shared_ptr<KvCache>& cache, size_t layer) { return cache_view(cache, layer, true); },
          py::arg("layer"))
      .def(
          "values",
          [](const std::shared_ptr<KvCache>& cache, size_t layer) { return cache_view(cache, layer, false); },
          py::arg("layer"))
      .def_property_readonly("n_bytes", &KvCache::n_bytes);

  py::class_<AttentionSession>(module, "ChunkedAttention")
      .def(py::init([](const PolicyPtr& policy, size_t n_heads, size_t n_kv_heads, size_t head_dim,
                       size_t n_layers, size_t chunk_size, size_t batch_size, size_t max_context,
                       std::optional<float> scale, float soft_cap, const std::string& cache_type) {
             return std::make_unique<AttentionSession>(
                 policy,
                 make_shape(n_heads, n_kv_heads, head_dim, n_layers, chunk_size, batch_size, max_context,
                            scale, soft_cap),
                 parse_cache_type(cache_type));
           }),
           py::arg("policy"), py::arg("n_heads"), py::arg("n_kv_heads"), py::arg("head_dim"), py::kw_only(),
           py::arg("n_layers") = 1, py::arg("chunk_size"), py::arg("batch_size"), py::arg("max_context"),
           py::arg("scale") = py::none(), py::arg("soft_cap") = 0.0f, py::arg("cache_type") = "f16")
      .def("run", &AttentionSession::run, py::arg("layer"), py::arg("q"), py::arg("k"), py::arg("v"),
           py::kw_only(), py::arg("window") = 0, py::arg("is_last"))
      .def("decode", &AttentionSession::decode, py::arg("layer"), py::arg("q"), py::arg("k"), py::arg("v"),
           py::kw_only(), py::arg("window") = 0)
      .def("reset", &AttentionSession::reset)
      .def("state", &AttentionSession::state)
      .def("position", &AttentionSession::position, py::arg("layer"))
      .def_property_readonly("cache", &AttentionSession::cache)
      .def_property_readonly("policy", &AttentionSession::policy)
      .def_property_readonly("pairs_computed", &AttentionSession::pairs_computed);
}

}  // namespace edgeh2o
