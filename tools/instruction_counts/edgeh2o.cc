// The operations of cases.h by edgeh2o, with the kernels that the processor gets by default.
#include <cmath>
#include <memory>

#include "base/parallel.h"
#include "cases.h"
#include "isa/select.h"
#include "ops/matmul.h"
#include "quant/packed_matrix.h"
#include "sequence/sequence.h"
#include "sparse/dense_policy.h"

namespace {

using namespace edgeh2o;

// Any bytes are weights; f16 scales of 0x2c.. are about 0.06.
PackedMatrix make_weights(const char* type) {
  const FormatInfo& info = find_format(type);
  const KernelTable& table = active_kernel_table();
  std::vector<uint8_t> data(kOutputs * kDepth / info.block_values * info.block_bytes);
  for (size_t i = 0; i < data.size(); ++i) {
    data[i] = i % info.block_bytes == 1 ? 0x2c : static_cast<uint8_t>(37 * i + i / 91);
  }
  return PackedMatrix(info, table.layout.panel_cols, table.layout.is_signed(info.format), data.data(),
                      data.size(), kOutputs, kDepth, nullptr);
}

void multiply(const char* type, size_t n_rows, size_t repetitions) {
  const KernelTable& table = active_kernel_table();
  const PackedMatrix weights = make_weights(type);
  std::vector<float> x = random_floats(n_rows * kDepth), out(n_rows * kOutputs);
  AlignedBuffer packed(Activations8::bytes(table, n_rows, kDepth)), scratch(matmul_scratch_bytes(table));
  const MatView<const float> rows{x.data(), n_rows, kDepth, kDepth};
  for (size_t i = 0; i < repetitions; ++i) {
    const MatmulInput input{quantize_rows(table, rows, packed_for(table, packed.data(), {&weights}, false)),
                            rows};
    const MatmulOutput output{&weights, nullptr, out.data(), kOutputs};
    matmul(table, input, {&output, 1}, {scratch.data(), {}});
  }
}

struct Attention {
  Sequence sequence;
  AlignedBuffer scratch;
  std::vector<float> q, k, v, out;

  Attention(size_t n_tokens, AttentionPrecision precision)
      : sequence(
            active_kernel_table(),
            {{kHeads, kKvHeads, kHeadDim, kHeadDim, 1.0f / std::sqrt(static_cast<float>(kHeadDim)), 0.0f}},
            std::make_shared<DensePolicy>(),
            {n_tokens, n_tokens, kPromptTokens, {CacheType::kF16, CacheType::kF16}, precision}),
        scratch(sequence.scratch_bytes(1)),
        q(random_floats(n_tokens * kHeads * kHeadDim)),
        k(random_floats(n_tokens * kKvHeads * kHeadDim)),
        v(random_floats(n_tokens * kKvHeads * kHeadDim)),
        out(q.size()) {
    const size_t width = kKvHeads * kHeadDim;
    sequence.layer(0).append({k.data(), n_tokens, width, width}, {v.data(), n_tokens, width, width});
  }

  ChunkedAttention attention() { return sequence.attention(0, scratch.data(), 1); }
  const LayerKv& cache() { return sequence.layer(0).rows(); }

  template <typename T>
  MatView<T> rows(std::vector<float>& values, size_t n) const {
    return {values.data(), n, kHeads * kHeadDim, kHeads * kHeadDim};
  }
};

void attend_prompt(AttentionPrecision precision, size_t repetitions) {
  Attention a(kPromptTokens, precision);
  for (size_t i = 0; i < repetitions; ++i) {
    a.attention().run(a.rows<const float>(a.q, kPromptTokens), a.cache(), 0, 0, PromptEnd::kFinal,
                      a.rows<float>(a.out, kPromptTokens));
  }
}

void attend_token(size_t repetitions) {
  Attention a(kCachedTokens, AttentionPrecision::kF32);
  for (size_t i = 0; i < repetitions; ++i) {
    a.sequence.decode_call(0, true, a.scratch.data(), 1)
        .run(a.rows<const float>(a.q, 1), a.cache(), kCachedTokens - 1, 0, a.rows<float>(a.out, 1));
  }
}

constexpr double kPromptProducts = 2 * kPromptPairs * kHeads * kHeadDim;
constexpr double kProduct = static_cast<double>(kDepth) * kOutputs;
const Case kCases[] = {
    {"gemm Q4_0", kProduct * kRows, [](size_t n) { multiply("Q4_0", kRows, n); }},
    {"gemm Q8_0", kProduct * kRows, [](size_t n) { multiply("Q8_0", kRows, n); }},
    {"gemv Q4_0", kProduct, [](size_t n) { multiply("Q4_0", 1, n); }},
    {"gemv Q8_0", kProduct, [](size_t n) { multiply("Q8_0", 1, n); }},
    {"attention, prefill", kPromptProducts, [](size_t n) { attend_prompt(AttentionPrecision::kF32, n); }},
    {"attention, prefill, f16", kPromptProducts,
     [](size_t n) { attend_prompt(AttentionPrecision::kF16, n); }},
    {"attention, prefill, int8", kPromptProducts,
     [](size_t n) { attend_prompt(AttentionPrecision::kInt8, n); }},
    {"attention, decode", 2.0 * kCachedTokens * kHeads * kHeadDim, attend_token},
};

}  // namespace

int main(int argc, char** argv) {
  edgeh2o::set_num_threads(1);
  return run_case(argc, argv, kCases, sizeof(kCases) / sizeof(*kCases));
}
