// The attention core on its own, for other runtimes: a KV cache, and chunked attention over it.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <vector>

#include "base/byte_stream.h"
#include "base/check.h"
#include "bindings/buffers.h"
#include "bindings/register.h"
#include "isa/select.h"
#include "model/kv_cache.h"
#include "ops/chunked_attention.h"
#include "ops/rows.h"

namespace py = pybind11;

namespace edgeh2o {
namespace {

using FloatArray = py::array_t<float, py::array::c_style | py::array::forcecast>;
using StridedArray = py::array_t<float, py::array::forcecast>;
using PolicyPtr = std::shared_ptr<SparsePolicy>;

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

// Tokens of q, k or v: [n_tokens][heads][head_dim] whose rows may lie apart, as those of a fused QKV do.
class TokenRows {
 public:
  TokenRows(const StridedArray& array, const char* name, size_t n_tokens, size_t n_heads, size_t head_dim,
            bool is_changed)
      : array_(array) {
    EH2O_CHECK(array_.ndim() == 3, name, " must be [n_tokens][heads][head_dim], got ", array_.ndim(),
               " dimensions");
    EH2O_CHECK(dim(0) == n_tokens && dim(1) == n_heads && dim(2) == head_dim, name, " must be [", n_tokens,
               "][", n_heads, "][", head_dim, "], got [", dim(0), "][", dim(1), "][", dim(2), "]");
    if (!has_whole_rows() || (is_changed && !array_.writeable())) array_ = FloatArray(array_.attr("copy")());
    const auto item = static_cast<py::ssize_t>(sizeof(float));
    const size_t width = n_heads * head_dim;
    const size_t stride = dim(0) > 1 ? static_cast<size_t>(array_.strides(0) / item) : width;
    view_ = {const_cast<float*>(array_.data()), dim(0), width, stride};
  }

  MatView<float> view() const { return view_; }
  MatView<const float> as_const() const { return {view_.data, view_.rows, view_.cols, view_.stride}; }

 private:
  size_t dim(int i) const { return static_cast<size_t>(array_.shape(i)); }
  bool has_whole_rows() const {
    const auto item = static_cast<py::ssize_t>(sizeof(float)), width = array_.shape(1) * array_.shape(2);
    const bool is_whole = (array_.shape(2) == 1 || array_.strides(2) == item) &&
                          (array_.shape(1) == 1 || array_.strides(1) == array_.shape(2) * item);
    return is_whole &&
           (array_.shape(0) <= 1 || (array_.strides(0) >= width * item && array_.strides(0) % item == 0));
  }

  StridedArray array_;
  MatView<float> view_;
};

// cos and sin of the tokens of a call, both [n_tokens][n_pairs].
class RotaryRows {
 public:
  RotaryRows(const std::optional<std::pair<FloatArray, FloatArray>>& tables, bool is_interleaved,
             size_t n_tokens, size_t head_dim)
      : tables_(tables), is_interleaved_(is_interleaved) {
    if (!tables_) return;
    const auto& [cos, sin] = *tables_;
    EH2O_CHECK(cos.ndim() == 2 && sin.ndim() == 2 && cos.shape(0) == sin.shape(0) &&
                   cos.shape(1) == sin.shape(1) && static_cast<size_t>(cos.shape(0)) == n_tokens,
               "the rotary tables must both be [n_tokens][pairs], of ", n_tokens, " tokens");
    n_pairs_ = static_cast<size_t>(cos.shape(1));
    EH2O_CHECK(n_pairs_ > 0 && 2 * n_pairs_ <= head_dim && n_pairs_ <= kMaxRotaryPairs,
               "the rotary tables have ", n_pairs_, " pairs, the heads ", head_dim, " dimensions");
  }

  explicit operator bool() const { return tables_.has_value(); }

  void rotate(const KernelTable& table, MatView<float> rows, size_t head_dim) const {
    if (!tables_) return;
    if (is_interleaved_) split_rotary_pairs(rows, head_dim, n_pairs_);
    rope_rows(table, rows, tables_->first.data(), tables_->second.data(), head_dim, n_pairs_);
  }

 private:
  std::optional<std::pair<FloatArray, FloatArray>> tables_;
  bool is_interleaved_;
  size_t n_pairs_ = 0;
};

// Chunked attention with its own cache: what a runtime needs that has no cache of ours.
class AttentionSession {
 public:
  using RotaryTables = std::optional<std::pair<FloatArray, FloatArray>>;
  using Output = std::optional<py::array_t<float, py::array::c_style>>;

  AttentionSession(const PolicyPtr& policy, const AttentionShape& shape, CacheType cache_type)
      : table_(active_kernel_table()),
        attention_(table_, shape, policy),
        policy_(policy),
        cache_(std::make_shared<KvCache>(table_, cache_shape(shape, cache_type))),
        positions_(shape.n_layers, 0) {}

  static py::dict estimate_bytes(const PolicyPtr& policy, const AttentionShape& shape, CacheType cache_type) {
    py::dict result;
    result["kv_cache"] = KvCache::estimate_bytes(cache_shape(shape, cache_type));
    result["scratch"] = ChunkedAttention::estimate_bytes(active_kernel_table(), shape, *policy);
    result["scores"] = policy->state_bytes(shape.policy_shape());
    return result;
  }

  // q, k, v: [n_tokens][heads][head_dim] of the next tokens of the prompt. If it throws, reset before going
  // on.
  py::array_t<float> run(size_t layer, const StridedArray& q, const StridedArray& k, const StridedArray& v,
                         size_t window, bool is_last, bool stays_open, const RotaryTables& rotary,
                         bool is_interleaved, const Output& out) {
    const size_t first = position(layer);
    const Call call(*this, q, k, v, rotary, is_interleaved, out);
    {
      const py::gil_scoped_release release;
      append(layer, call);
      attention_.run(layer, call.q.as_const(), cache_->view(layer), first, window,
                     prompt_end(is_last, stays_open), call.out_rows());
    }
    last_output_ = call.output;
    n_rows_ = call.n_tokens;
    positions_[layer] += call.n_tokens;
    prefill_end_ = positions_[layer];
    n_pairs_dense_ += causal_pairs(first, call.n_tokens, window);
    return call.output;
  }

  py::array_t<float> decode(size_t layer, const StridedArray& q, const StridedArray& k, const StridedArray& v,
                            size_t window, const RotaryTables& rotary, bool is_interleaved,
                            const Output& out) {
    EH2O_CHECK(q.ndim() == 3 && q.shape(0) == 1, "decode takes one token: q [1][n_heads][head_dim]");
    const size_t first = position(layer);
    const Call call(*this, q, k, v, rotary, is_interleaved, out);
    {
      const py::gil_scoped_release release;
      append(layer, call);
      attention_.decode(call.q.as_const(), cache_->view(layer), first, window, call.out_rows());
    }
    ++positions_[layer];
    return call.output;
  }

  void reset() {
    attention_.begin_prompt();
    std::fill(positions_.begin(), positions_.end(), 0);
    prefill_end_ = n_rows_ = 0;
    n_pairs_dense_ = 0;
  }

  // Forgets the tokens from `position` on, of every layer; only tokens that decode appended can go.
  void rewind(size_t position) {
    EH2O_CHECK(prefill_end_ <= position && position <= common_position(), "cannot go back to position ",
               position, ": the prompt ends at ", prefill_end_, " and the tokens at ", common_position());
    std::fill(positions_.begin(), positions_.end(), position);
  }

  // As Session's of model/session.h.
  py::bytes save_state() const {
    ByteWriter out;
    out.put<uint64_t>(common_position());
    out.put<uint64_t>(prefill_end_);
    out.put<uint64_t>(n_pairs_dense_);
    out.put<uint64_t>(attention_.pairs_of_all_heads());
    attention_.policy().save(common_position(), out);
    const std::vector<uint8_t>& bytes = out.bytes();
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }

  void load_state(const py::buffer& buffer) {
    const py::buffer_info info = buffer.request();
    const Span<const uint8_t> bytes = contiguous_bytes(info, "the state");
    reset();
    ByteReader in(bytes);
    try {
      const size_t position =
          in.take_at_most<uint64_t>(attention_.shape().max_context, "the number of tokens");
      prefill_end_ = in.take_at_most<uint64_t>(position, "the end of the prompt");
      n_pairs_dense_ = in.take<uint64_t>();
      const uint64_t n_pairs = in.take<uint64_t>();
      attention_.load(position, n_pairs, in);
      in.check_end();
      std::fill(positions_.begin(), positions_.end(), position);
    } catch (...) {
      reset();
      throw;
    }
  }

  // A list of one writable view per KV head: its keys, then its values.
  static py::list cached_rows(const std::shared_ptr<AttentionSession>& self, size_t layer) {
    const LayerKv kv = self->cache_->view(layer);
    const size_t n_tokens = self->position(layer);
    py::list views;
    for (size_t head = 0; head < self->cache_->shape().n_kv_heads; ++head) {
      for (const KvRows& rows : {kv.k(head), kv.v(head)}) {
        const auto n_bytes = static_cast<py::ssize_t>(rows.row(n_tokens) - rows.row(0));
        views.append(py::array_t<uint8_t>(n_bytes, rows.row(0), py::cast(self)));
      }
    }
    return views;
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
  size_t prefill_end() const { return prefill_end_; }
  uint64_t pairs_computed() const { return attention_.pairs_computed(); }
  uint64_t pairs_dense() const { return n_pairs_dense_ / positions_.size(); }

 private:
  // The arrays of one call, checked.
  struct Call {
    Call(const AttentionSession& session, const StridedArray& q_in, const StridedArray& k_in,
         const StridedArray& v_in, const RotaryTables& tables, bool is_interleaved, const Output& out)
        : n_tokens(q_in.ndim() > 0 ? static_cast<size_t>(q_in.shape(0)) : 0),
          shape(session.attention_.shape()),
          rotary(tables, is_interleaved, n_tokens, shape.head_dim),
          q(q_in, "q", n_tokens, shape.n_heads, shape.head_dim, static_cast<bool>(rotary)),
          k(k_in, "k", n_tokens, shape.n_kv_heads, shape.head_dim, static_cast<bool>(rotary)),
          v(v_in, "v", n_tokens, shape.n_kv_heads, shape.head_dim, false) {
      EH2O_CHECK(n_tokens > 0 && n_tokens <= shape.batch_size,
                 "a call takes 1 to batch_size = ", shape.batch_size, " tokens, got ", n_tokens);
      if (!out) {
        output = py::array_t<float>({n_tokens, shape.n_heads, shape.head_dim});
        return;
      }
      output = *out;
      EH2O_CHECK(output.ndim() == 3 && static_cast<size_t>(output.shape(0)) == n_tokens &&
                     static_cast<size_t>(output.shape(1)) == shape.n_heads &&
                     static_cast<size_t>(output.shape(2)) == shape.head_dim && output.writeable(),
                 "out must be a writable array of the shape of q");
    }

    MatView<float> out_rows() const {
      const size_t width = shape.n_heads * shape.head_dim;
      return {const_cast<float*>(output.data()), n_tokens, width, width};
    }

    size_t n_tokens;
    const AttentionShape& shape;
    RotaryRows rotary;
    TokenRows q, k, v;
    py::array_t<float> output;
  };

  static KvCache::Shape cache_shape(const AttentionShape& shape, CacheType cache_type) {
    return {shape.n_layers, shape.n_kv_heads, shape.head_dim, shape.max_context, cache_type};
  }

  size_t common_position() const {
    EH2O_CHECK(
        std::all_of(positions_.begin(), positions_.end(), [&](size_t p) { return p == positions_[0]; }),
        "the layers hold different numbers of tokens");
    return positions_[0];
  }

  // Rotates what is to be rotated and writes the new rows to the cache.
  void append(size_t layer, const Call& call) {
    call.rotary.rotate(table_, call.q.view(), call.shape.head_dim);
    call.rotary.rotate(table_, call.k.view(), call.shape.head_dim);
    cache_->write(layer, position(layer), call.k.as_const(), call.v.as_const());
  }

  const KernelTable& table_;
  ChunkedAttention attention_;
  PolicyPtr policy_;
  std::shared_ptr<KvCache> cache_;
  std::vector<size_t> positions_;  // per layer: tokens in the cache
  size_t prefill_end_ = 0;         // of the latest run, whatever its layer
  uint64_t n_pairs_dense_ = 0;     // summed over layers
  size_t n_rows_ = 0;              // tokens of the latest run
  py::array_t<float> last_output_;
};

AttentionShape make_shape(size_t n_heads, size_t n_kv_heads, size_t head_dim, size_t n_layers,
                          size_t chunk_size, size_t batch_size, size_t max_context,
                          std::optional<float> scale, float soft_cap, const std::string& precision) {
  const float default_scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
  return {n_layers,    n_heads,
          n_kv_heads,  head_dim,
          max_context, batch_size,
          chunk_size,  scale.value_or(default_scale),
          soft_cap,    parse_attention_precision(precision)};
}

template <typename F>
auto with_shape(const F& make) {
  return [make](const PolicyPtr& policy, size_t n_heads, size_t n_kv_heads, size_t head_dim, size_t n_layers,
                size_t chunk_size, size_t batch_size, size_t max_context, std::optional<float> scale,
                float soft_cap, const std::string& cache_type, const std::string& precision) {
    return make(policy,
                make_shape(n_heads, n_kv_heads, head_dim, n_layers, chunk_size, batch_size, max_context,
                           scale, soft_cap, precision),
                parse_cache_type(cache_type));
  };
}

void bind_kv_cache(py::module_& module) {
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
}

}  // namespace

void bind_attention_session(py::module_& module) {
  bind_kv_cache(module);
  const auto shape_args = [](auto&& define) {
    define(py::arg("policy"), py::arg("n_heads"), py::arg("n_kv_heads"), py::arg("head_dim"), py::kw_only(),
           py::arg("n_layers") = 1, py::arg("chunk_size"), py::arg("batch_size"), py::arg("max_context"),
           py::arg("scale") = py::none(), py::arg("soft_cap") = 0.0f, py::arg("cache_type") = "f16",
           py::arg("precision") = "f32");
  };
  py::class_<AttentionSession, std::shared_ptr<AttentionSession>> session(module, "ChunkedAttention");
  shape_args([&](auto&&... args) {
    session.def(py::init(with_shape([](const PolicyPtr& policy, const AttentionShape& shape, CacheType type) {
                  return std::make_shared<AttentionSession>(policy, shape, type);
                })),
                args...);
    session.def_static("estimate_bytes", with_shape(&AttentionSession::estimate_bytes), args...);
  });
  session
      .def("run", &AttentionSession::run, py::arg("layer"), py::arg("q"), py::arg("k"), py::arg("v"),
           py::kw_only(), py::arg("window") = 0, py::arg("is_last"), py::arg("stays_open") = false,
           py::arg("rotary") = py::none(), py::arg("is_interleaved") = false, py::arg("out") = py::none())
      .def("decode", &AttentionSession::decode, py::arg("layer"), py::arg("q"), py::arg("k"), py::arg("v"),
           py::kw_only(), py::arg("window") = 0, py::arg("rotary") = py::none(),
           py::arg("is_interleaved") = false, py::arg("out") = py::none())
      .def("reset", &AttentionSession::reset)
      .def("rewind", &AttentionSession::rewind, py::arg("position"))
      .def("state", &AttentionSession::state)
      .def("save_state", &AttentionSession::save_state)
      .def("load_state", &AttentionSession::load_state, py::arg("state"))
      .def("cached_rows", &AttentionSession::cached_rows, py::arg("layer"))
      .def("position", &AttentionSession::position, py::arg("layer"))
      .def_property_readonly("prefill_end", &AttentionSession::prefill_end)
      .def_property_readonly("cache", &AttentionSession::cache)
      .def_property_readonly("policy", &AttentionSession::policy)
      .def_property_readonly("pairs_computed", &AttentionSession::pairs_computed)
      .def_property_readonly("pairs_dense", &AttentionSession::pairs_dense);
}

}  // namespace edgeh2o
