// The attention core on its own, for other runtimes.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cmath>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "base/check.h"
#include "base/parallel.h"
#include "bindings/buffers.h"
#include "bindings/register.h"
#include "bindings/sequence_methods.h"
#include "isa/select.h"
#include "ops/convolution.h"
#include "ops/rows.h"
#include "sequence/sequence.h"

namespace py = pybind11;

namespace edgeh2o {
namespace {

using StridedArray = py::array_t<float, py::array::forcecast>;
using PolicyPtr = std::shared_ptr<SparsePolicy>;

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
  MatView<const float> as_const() const { return edgeh2o::as_const(view_); }

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

using Layers = std::vector<LayerKeeps>;

// A sequence without a decoder: what a runtime needs that has no cache of ours. Layers that attend are alike.
class AttentionSequence {
 public:
  using RotaryTables = std::optional<std::pair<FloatArray, FloatArray>>;
  using Output = std::optional<py::array_t<float, py::array::c_style>>;
  using Sinks = std::optional<FloatArray>;

  AttentionSequence(const PolicyPtr& rule, const AttentionHeads& heads, const Layers& layers,
                    const SequenceShape& shape, std::optional<int> n_threads)
      : policy(rule),
        sequence(active_kernel_table(), layers, rule, shape),
        table_(active_kernel_table()),
        heads_(heads),
        n_threads_(n_threads.value_or(num_threads())) {
    check_num_threads(n_threads_);
    scratch_ = AlignedBuffer(sequence.scratch_bytes(static_cast<size_t>(n_threads_)));
  }

  static py::dict estimate_bytes(const PolicyPtr& policy, const AttentionHeads&, const Layers& layers,
                                 const SequenceShape& shape, std::optional<int> n_threads) {
    const auto threads = static_cast<size_t>(n_threads.value_or(num_threads()));
    return to_dict(Sequence::estimate_bytes(active_kernel_table(), layers, *policy, shape, threads), 0);
  }

  // q, k, v: [n_tokens][heads][head_dim] of the next tokens of the prompt. If it throws, reset before going
  // on.
  py::array_t<float> run(size_t layer, const StridedArray& q, const StridedArray& k, const StridedArray& v,
                         size_t window, bool is_last, bool stays_open, const RotaryTables& rotary,
                         bool is_interleaved, const Sinks& sinks, const Output& out) {
    const Call call(*this, q, k, v, rotary, is_interleaved, out);
    run_locked(layer, call, sinks, [&] {
      sequence.attend(layer, call.q.as_const(), window, prompt_end(is_last, stays_open), scratch_.data(),
                      static_cast<size_t>(n_threads_), call.out_rows());
    });
    last_output_ = call.output;
    last_layer_ = layer;
    n_rows_ = sequence.shape().guard.n_rows > 0 ? 0 : call.n_tokens;  // the guard takes the scratch
    sequence.end_prefill(position(layer));
    return call.output;
  }

  py::array_t<float> decode(size_t layer, const StridedArray& q, const StridedArray& k, const StridedArray& v,
                            size_t window, const RotaryTables& rotary, bool is_interleaved,
                            const Sinks& sinks, const Output& out) {
    EH2O_CHECK(q.ndim() == 3 && q.shape(0) == 1, "decode takes one token: q [1][n_heads][head_dim]");
    const Call call(*this, q, k, v, rotary, is_interleaved, out);
    run_locked(layer, call, sinks, [&] {
      sequence.decode_call(layer, true, scratch_.data(), static_cast<size_t>(n_threads_))
          .run(call.q.as_const(), sequence.layer(layer).rows(), position(layer) - 1, window, call.out_rows());
    });
    n_rows_ = 0;  // its scratch held the state
    return call.output;
  }

  // ops/convolution.h: of the next tokens, in a layer with a recurrent state of n_taps - 1 rows.
  void short_conv(size_t layer, py::array_t<float, py::array::c_style> bcy, const FloatArray& weights,
                  py::array_t<float, py::array::c_style> out) {
    position(layer);  // that there is one
    EH2O_CHECK(sequence.has_recurrent(layer), "layer ", layer, " has no recurrent state");
    EH2O_CHECK(weights.ndim() == 2 && weights.shape(0) >= 2, "weights must be [n_taps >= 2][dim]");
    const auto n_taps = static_cast<size_t>(weights.shape(0)), dim = static_cast<size_t>(weights.shape(1));
    RecurrentState& state = sequence.recurrent(layer);
    EH2O_CHECK(n_taps <= kMaxConvTaps && (n_taps - 1) * dim == state.n_values(), "weights of [", n_taps, "][",
               dim, "] do not go with a state of ", state.n_values(), " numbers");
    const size_t n_tokens = bcy.ndim() == 2 ? static_cast<size_t>(bcy.shape(0)) : 0;
    EH2O_CHECK(n_tokens > 0 && static_cast<size_t>(bcy.shape(1)) == 3 * dim && bcy.writeable() &&
                   out.ndim() == 2 && static_cast<size_t>(out.shape(0)) == n_tokens &&
                   static_cast<size_t>(out.shape(1)) == dim && out.writeable(),
               "bcy and out must be writable arrays [n_tokens][", 3 * dim, "] and [n_tokens][", dim, "]");
    EH2O_CHECK(n_tokens <= sequence.shape().max_context - state.n_tokens(), state.n_tokens(), " plus ",
               n_tokens, " tokens exceed the context of ", sequence.shape().max_context);
    const MatView<float> rows{bcy.mutable_data(), n_tokens, 3 * dim, 3 * dim};
    const MatView<float> results{out.mutable_data(), n_tokens, dim, dim};
    const py::gil_scoped_release release;
    const std::lock_guard<std::mutex> lock(mutex_);
    const ThreadScope threads(n_threads_);
    edgeh2o::short_conv(table_, rows, weights.data(), n_taps, state.step(false, 0), results);
    state.advance(n_tokens);
  }

  void load_state(const py::buffer& state, const std::vector<py::buffer>& marks) {
    forget_prompt();
    load_states(sequence, state, marks);
  }

  // (m, l, o) of the rows of the latest run: [n_tokens][n_heads], and o with [head_dim].
  py::tuple state() {
    EH2O_CHECK(n_rows_ > 0, "there is no state of a run");
    const std::vector<size_t> shape{n_rows_, heads_.n_heads};
    py::array_t<float> m(shape), l(shape);
    attention(last_layer_).read_state(n_rows_, m.mutable_data(), l.mutable_data());
    return py::make_tuple(m, l, last_output_);
  }

  size_t position(size_t layer) const {
    EH2O_CHECK(layer < sequence.n_layers(), "layer ", layer, " does not exist; there are ",
               sequence.n_layers());
    return sequence.attends(layer) ? sequence.layer(layer).n_tokens() : sequence.recurrent(layer).n_tokens();
  }
  void forget_prompt() { n_rows_ = 0; }
  void fetch_rows() {}
  void fetch_states() {}

  // A view of [kv_head][position][head_dim]; of q8_0, which NumPy has not, the bytes [kv_head][position][row
  // bytes].
  static py::array cache_view(const std::shared_ptr<AttentionSequence>& self, size_t layer, bool is_keys) {
    self->check_attends(layer);
    const LayerKv& kv = self->sequence.layer(layer).rows();
    const KvRows& rows = is_keys ? kv.k_head0 : kv.v_head0;
    const py::dtype item(rows.type == CacheType::kF16   ? "float16"
                         : rows.type == CacheType::kF32 ? "float32"
                                                        : "uint8");
    const size_t row_bytes = kv_row_bytes(rows.type, rows.head_dim);
    const auto item_bytes = static_cast<size_t>(item.itemsize());
    return py::array(item, {self->heads_.n_kv_heads, kv.n_positions, row_bytes / item_bytes},
                     {kv.n_positions * row_bytes, row_bytes, item_bytes}, rows.data, py::cast(self));
  }
  size_t cache_bytes() const {
    size_t n_bytes = 0;
    for (size_t i = 0; i < sequence.n_layers(); ++i) {
      if (!sequence.attends(i)) continue;
      for (const KvRows& rows : {sequence.layer(i).rows().k_head0, sequence.layer(i).rows().v_head0}) {
        n_bytes += kv_row_bytes(rows.type, rows.head_dim);
      }
    }
    return n_bytes * heads_.n_kv_heads * sequence.shape().max_context;
  }

  PolicyPtr policy;
  Sequence sequence;

 private:
  // The arrays of one call, checked.
  struct Call {
    Call(const AttentionSequence& owner, const StridedArray& q_in, const StridedArray& k_in,
         const StridedArray& v_in, const RotaryTables& tables, bool is_interleaved, const Output& out)
        : n_tokens(q_in.ndim() > 0 ? static_cast<size_t>(q_in.shape(0)) : 0),
          heads(owner.heads_),
          rotary(tables, is_interleaved, n_tokens, heads.key_dim),
          q(q_in, "q", n_tokens, heads.n_heads, heads.key_dim, static_cast<bool>(rotary)),
          k(k_in, "k", n_tokens, heads.n_kv_heads, heads.key_dim, static_cast<bool>(rotary)),
          v(v_in, "v", n_tokens, heads.n_kv_heads, heads.value_dim, false) {
      const size_t most = owner.sequence.shape().batch_size;
      EH2O_CHECK(n_tokens > 0 && n_tokens <= most, "a call takes 1 to batch_size = ", most, " tokens, got ",
                 n_tokens);
      if (!out) {
        output = py::array_t<float>({n_tokens, heads.n_heads, heads.value_dim});
        return;
      }
      output = *out;
      EH2O_CHECK(output.ndim() == 3 && static_cast<size_t>(output.shape(0)) == n_tokens &&
                     static_cast<size_t>(output.shape(1)) == heads.n_heads &&
                     static_cast<size_t>(output.shape(2)) == heads.value_dim && output.writeable(),
                 "out must be a writable array [n_tokens][n_heads][head_dim]");
    }

    MatView<float> out_rows() const {
      return {const_cast<float*>(output.data()), n_tokens, heads.out_dim(), heads.out_dim()};
    }

    size_t n_tokens;
    const AttentionHeads& heads;
    RotaryRows rotary;
    TokenRows q, k, v;
    py::array_t<float> output;
  };

  void check_attends(size_t layer) const {
    position(layer);  // that there is one
    EH2O_CHECK(sequence.attends(layer), "layer ", layer, " does not attend: it has a recurrent state");
  }
  ChunkedAttention attention(size_t layer) {
    return sequence.attention(layer, scratch_.data(), static_cast<size_t>(n_threads_));
  }

  // Rotates what is to be rotated, writes the new rows to the cache, and runs f.
  template <typename F>
  void run_locked(size_t layer, const Call& call, const Sinks& sinks, const F& f) {
    check_attends(layer);
    EH2O_CHECK(!sinks || (sinks->ndim() == 1 && static_cast<size_t>(sinks->shape(0)) == heads_.n_heads),
               "sinks must be [n_heads], of ", heads_.n_heads, " heads");
    const py::gil_scoped_release release;
    const std::lock_guard<std::mutex> lock(mutex_);
    const ThreadScope threads(n_threads_);
    call.rotary.rotate(table_, call.q.view(), heads_.key_dim);
    call.rotary.rotate(table_, call.k.view(), heads_.key_dim);
    sequence.layer(layer).append(call.k.as_const(), call.v.as_const());
    sequence.layer(layer).set_sinks(sinks ? sinks->data() : nullptr);
    f();
    sequence.layer(layer).set_sinks(nullptr);
  }

  const KernelTable& table_;
  AttentionHeads heads_;
  int n_threads_;
  AlignedBuffer scratch_;
  std::mutex mutex_;                    // of the scratch
  size_t n_rows_ = 0, last_layer_ = 0;  // of the latest run: tokens, and whose state lies in the scratch
  py::array_t<float> last_output_;
};

// The cache of a sequence, to look at.
struct KvCache {
  std::shared_ptr<AttentionSequence> owner;
};

template <typename F>
auto with_shape(const F& make) {
  return [make](const PolicyPtr& policy, size_t n_heads, size_t n_kv_heads, size_t head_dim, size_t n_layers,
                size_t chunk_size, size_t batch_size, size_t max_context, std::optional<float> scale,
                float soft_cap, const std::string& cache_type, const std::string& precision,
                std::optional<size_t> value_dim, size_t checked_rows, double error_limit,
                std::optional<int> threads, const std::vector<size_t>& recurrent, bool is_causal,
                float max_alibi_bias) {
    const float default_scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
    AttentionHeads heads{
        n_heads, n_kv_heads, head_dim, value_dim.value_or(head_dim), scale.value_or(default_scale), soft_cap};
    heads.is_causal = is_causal;
    heads.max_alibi_bias = max_alibi_bias;
    SequenceShape shape{max_context,
                        batch_size,
                        chunk_size,
                        parse_cache_types(cache_type),
                        parse_attention_precision(precision),
                        true,
                        {checked_rows, error_limit}};
    shape.looks_ahead = false;
    Layers layers(n_layers, {heads});
    EH2O_CHECK(recurrent.empty() || recurrent.size() == n_layers, "recurrent has the sizes of ",
               recurrent.size(), " layers, there are ", n_layers);
    for (size_t i = 0; i < recurrent.size(); ++i) {
      if (recurrent[i] > 0) layers[i] = {{}, {{}, {}, {}, recurrent[i], 2}};  // as those of one input
    }
    return make(policy, heads, layers, shape, threads);
  };
}

}  // namespace

void bind_chunked_attention(py::module_& module) {
  py::class_<KvCache>(module, "KvCache")
      .def(
          "keys",
          [](const KvCache& cache, size_t layer) {
            return AttentionSequence::cache_view(cache.owner, layer, true);
          },
          py::arg("layer"))
      .def(
          "values",
          [](const KvCache& cache, size_t layer) {
            return AttentionSequence::cache_view(cache.owner, layer, false);
          },
          py::arg("layer"))
      .def_property_readonly("n_bytes", [](const KvCache& cache) { return cache.owner->cache_bytes(); });

  const auto shape_args = [](auto&& define) {
    define(py::arg("policy"), py::arg("n_heads"), py::arg("n_kv_heads"), py::arg("head_dim"), py::kw_only(),
           py::arg("n_layers") = 1, py::arg("chunk_size"), py::arg("batch_size"), py::arg("max_context"),
           py::arg("scale") = py::none(), py::arg("soft_cap") = 0.0f, py::arg("cache_type") = "f16",
           py::arg("precision") = "f32", py::arg("value_dim") = py::none(), py::arg("checked_rows") = 0,
           py::arg("error_limit") = std::numeric_limits<double>::infinity(), py::arg("threads") = py::none(),
           py::arg("recurrent") = std::vector<size_t>(), py::arg("is_causal") = true,
           py::arg("max_alibi_bias") = 0.0f);
  };
  py::class_<AttentionSequence, std::shared_ptr<AttentionSequence>> c(module, "ChunkedAttention");
  shape_args([&](auto&&... args) {
    c.def(
        py::init(with_shape([](auto&&... values) { return std::make_shared<AttentionSequence>(values...); })),
        args...);
    c.def_static("estimate_bytes", with_shape(&AttentionSequence::estimate_bytes), args...);
  });
  bind_sequence_methods<AttentionSequence>(c);
  c.def("run", &AttentionSequence::run, py::arg("layer"), py::arg("q"), py::arg("k"), py::arg("v"),
        py::kw_only(), py::arg("window") = 0, py::arg("is_last"), py::arg("stays_open") = false,
        py::arg("rotary") = py::none(), py::arg("is_interleaved") = false, py::arg("sinks") = py::none(),
        py::arg("out") = py::none())
      .def("decode", &AttentionSequence::decode, py::arg("layer"), py::arg("q"), py::arg("k"), py::arg("v"),
           py::kw_only(), py::arg("window") = 0, py::arg("rotary") = py::none(),
           py::arg("is_interleaved") = false, py::arg("sinks") = py::none(), py::arg("out") = py::none())
      .def("short_conv", &AttentionSequence::short_conv, py::arg("layer"), py::arg("bcy").noconvert(),
           py::arg("weights"), py::arg("out").noconvert())
      .def("begin_call", [](AttentionSequence& self) { self.sequence.begin_call(); })
      .def("end_call", [](AttentionSequence& self) { self.sequence.end_call(); })
      .def("state", &AttentionSequence::state)
      .def("load_state", &AttentionSequence::load_state, py::arg("state"),
           py::arg("marks") = std::vector<py::buffer>())
      .def("position", &AttentionSequence::position, py::arg("layer"))
      .def_property_readonly("n_tokens",
                             [](const AttentionSequence& self) { return self.sequence.position(); })
      .def_property_readonly("cache",
                             [](const std::shared_ptr<AttentionSequence>& self) { return KvCache{self}; })
      .def_property_readonly("pairs_computed",
                             [](const AttentionSequence& self) {
                               return self.sequence.pairs_computed(self.sequence.n_layers());
                             })
      .def_property_readonly("pairs_dense", [](const AttentionSequence& self) {
        return self.sequence.pairs_dense(self.sequence.n_layers());
      });
}

}  // namespace edgeh2o
