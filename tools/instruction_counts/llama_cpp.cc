// The operations of cases.h by ggml, the library under llama.cpp: weights in the layout that llama.cpp gives
// them on this processor, one thread.
#include <ggml-alloc.h>
#include <ggml-backend.h>
#include <ggml-cpu.h>
#include <ggml.h>

#include <cmath>

#include "cases.h"

namespace {

struct Graph {
  ggml_backend_t backend = ggml_backend_cpu_init();
  ggml_context* context = ggml_init({1 << 24, nullptr, true});
  ggml_context* weight_context = ggml_init({1 << 16, nullptr, true});
  ggml_backend_buffer_t buffer = nullptr, weight_buffer = nullptr;

  Graph() { ggml_backend_cpu_set_n_threads(backend, 1); }
  void compute(ggml_tensor* result, size_t repetitions) {
    ggml_cgraph* graph = ggml_new_graph(context);
    ggml_build_forward_expand(graph, result);
    for (size_t i = 0; i < repetitions; ++i) {
      if (ggml_backend_graph_compute(backend, graph) != GGML_STATUS_SUCCESS) std::abort();
    }
  }
};

void fill(ggml_tensor* tensor) {
  const std::vector<float> values = random_floats(static_cast<size_t>(ggml_nelements(tensor)));
  std::vector<uint8_t> data(ggml_nbytes(tensor));
  if (tensor->type == GGML_TYPE_F32) {
    std::memcpy(data.data(), values.data(), data.size());
  } else {
    ggml_quantize_chunk(tensor->type, values.data(), data.data(), 0, ggml_nrows(tensor), tensor->ne[0],
                        nullptr);
  }
  ggml_backend_tensor_set(tensor, data.data(), 0, data.size());
}

// The buffer type that llama.cpp prefers for weights: repacked, if there is a kernel for it.
ggml_backend_buffer_type_t weight_buffer_type() {
  ggml_backend_dev_t device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
  ggml_backend_reg_t registry = ggml_backend_dev_backend_reg(device);
  using GetExtra = ggml_backend_buffer_type_t* (*)(ggml_backend_dev_t);
  const auto get = reinterpret_cast<GetExtra>(
      ggml_backend_reg_get_proc_address(registry, "ggml_backend_dev_get_extra_bufts"));
  for (ggml_backend_buffer_type_t* type = get ? get(device) : nullptr; type && *type; ++type) {
    if (std::strstr(ggml_backend_buft_name(*type), "REPACK")) return *type;
  }
  return ggml_backend_cpu_buffer_type();
}

void multiply(ggml_type type, size_t n_rows, size_t repetitions) {
  Graph g;
  ggml_tensor* w = ggml_new_tensor_2d(g.weight_context, type, kDepth, kOutputs);
  g.weight_buffer = ggml_backend_alloc_ctx_tensors_from_buft(g.weight_context, weight_buffer_type());
  ggml_tensor* x = ggml_new_tensor_2d(g.context, GGML_TYPE_F32, kDepth, static_cast<int64_t>(n_rows));
  ggml_tensor* y = ggml_mul_mat(g.context, w, x);
  g.buffer = ggml_backend_alloc_ctx_tensors(g.context, g.backend);
  fill(w);
  fill(x);
  g.compute(y, repetitions);
}

ggml_tensor* new_heads(Graph& g, ggml_type type, size_t n_tokens, size_t n_heads) {
  return ggml_new_tensor_3d(g.context, type, kHeadDim, static_cast<int64_t>(n_tokens),
                            static_cast<int64_t>(n_heads));
}

// Queries of the last n_queries of n_keys positions. Flash attention, as llama.cpp chooses by default.
void attend(size_t n_queries, size_t n_keys, size_t repetitions) {
  Graph g;
  ggml_tensor* q = new_heads(g, GGML_TYPE_F32, n_queries, kHeads);
  ggml_tensor* k = new_heads(g, GGML_TYPE_F16, n_keys, kKvHeads);
  ggml_tensor* v = new_heads(g, GGML_TYPE_F16, n_keys, kKvHeads);
  ggml_tensor* mask = ggml_new_tensor_2d(g.context, GGML_TYPE_F16, static_cast<int64_t>(n_keys),
                                         static_cast<int64_t>(n_queries));
  const float scale = 1.0f / std::sqrt(static_cast<float>(kHeadDim));
  ggml_tensor* out = ggml_flash_attn_ext(g.context, q, k, v, mask, scale, 0.0f, 0.0f);
  g.buffer = ggml_backend_alloc_ctx_tensors(g.context, g.backend);
  fill(q), fill(k), fill(v);
  std::vector<ggml_fp16_t> hidden(n_keys * n_queries);
  for (size_t i = 0; i < hidden.size(); ++i) {
    const bool is_future = i % n_keys > n_keys - n_queries + i / n_keys;
    hidden[i] = ggml_fp32_to_fp16(is_future ? -INFINITY : 0.0f);
  }
  ggml_backend_tensor_set(mask, hidden.data(), 0, hidden.size() * sizeof(ggml_fp16_t));
  g.compute(out, repetitions);
}

constexpr double kProduct = static_cast<double>(kDepth) * kOutputs;
const Case kCases[] = {
    {"gemm Q4_0", kProduct * kRows, [](size_t n) { multiply(GGML_TYPE_Q4_0, kRows, n); }},
    {"gemm Q8_0", kProduct * kRows, [](size_t n) { multiply(GGML_TYPE_Q8_0, kRows, n); }},
    {"gemv Q4_0", kProduct, [](size_t n) { multiply(GGML_TYPE_Q4_0, 1, n); }},
    {"gemv Q8_0", kProduct, [](size_t n) { multiply(GGML_TYPE_Q8_0, 1, n); }},
    {"attention, prefill", 2 * kPromptPairs * kHeads * kHeadDim,
     [](size_t n) { attend(kPromptTokens, kPromptTokens, n); }},
    {"attention, decode", 2.0 * kCachedTokens * kHeads * kHeadDim,
     [](size_t n) { attend(1, kCachedTokens, n); }},
};

}  // namespace

int main(int argc, char** argv) { return run_case(argc, argv, kCases, sizeof(kCases) / sizeof(*kCases)); }
