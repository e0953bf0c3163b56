// Compiles every kernel for the ISA whose simd header was included, and collects them in kTable.
#include "isa/kernels-inl.h"

#define EH2O_STRING_(x) #x
#define EH2O_STRING(x) EH2O_STRING_(x)

namespace edgeh2o::EH2O_ISA {

static_assert(kGemmQ8Columns == kGemmF32Columns, "one panel width for all weights");

// 32 rows of the 1B shape in Q4_0: 82 ms in four tiles (AVX-512), 95 unpacked; 40 rows: no difference. Matrix
// instructions, which need unpacked weights, pay sooner.
inline constexpr size_t kFewRows = simd::kGemvRows * (simd::kHasMmla ? 1 : 4);

// Quants in planes of bits are stored unsigned on every ISA and converted when they are unpacked.
template <PackedFormat kFormat>
inline constexpr uint32_t kSignedBit =
    simd::Dot4<PackedTraits<kFormat>::kBits>::kSigned&& PackedTraits<kFormat>::kLowBits == 8
        ? uint32_t{1} << static_cast<int>(kFormat)
        : 0;

constexpr std::array<Unpacked, kPackedFormats> unpacked_formats() {
  std::array<Unpacked, kPackedFormats> kinds{};  // of floats: kFloats
#define EH2O_KIND(name) \
  kinds[static_cast<size_t>(PackedFormat::name)] = kUnpackedAs<PackedFormat::name, simd::WordDot>;
  EH2O_QUANTISED_FORMATS(EH2O_KIND)
#undef EH2O_KIND
  return kinds;
}

template <typename Integers, bool kExists>
constexpr AttentionKernels integer_attention_kernels() {
  if constexpr (kExists) {
    return {kIntegerLayout<Integers>.per_word, kLevelKeys,
            pack_integer_queries<Integers>,    pack_integer_keys<Integers>,
            pack_integer_values<Integers>,     attention_integer_tile<Integers>,
            integer_column_sums<Integers>,     peak_integers<Integers>};
  } else {
    return {};
  }
}

#define EH2O_SIGNED(name) | kSignedBit<PackedFormat::name>
extern const KernelTable kTable;
const KernelTable kTable = {
    EH2O_STRING(EH2O_ISA),
    {kGemmQ8Columns, simd::kGemmQ8Rows, simd::kGemvRows, simd::kGemvFloatRows, kFewRows,
     0 EH2O_QUANTISED_FORMATS(EH2O_SIGNED), simd::kGemmF32Rows, simd::kDotBias, unpacked_formats(),
     kHasPairs<simd::WordDot>},
    {attention_kernels<F32Products, true>(), attention_kernels<Bf16Products, simd::kHasBf16>(),
     attention_kernels<F16Products<simd::Halves>, simd::kHasF16>(),
     integer_attention_kernels<simd::Bytes, simd::kHasBytes>(),
     integer_attention_kernels<simd::Shorts, simd::kHasShorts>()},
    simd::kHasShorts ? AttentionPrecision::kInt16 : AttentionPrecision::kF32,
    quantize_q8p_f32,
    unpack_q_qp,
    gemm_f32_q8_qp,
    gemv_f32_q8_qp,
    unpack_f32_fp,
    gemm_f32_f32_f32p,
    gemv_f32_f32_fp,
    rms_norm_f32,
    layer_norm_f32,
    rope_f32,
    swiglu_f32,
    geglu_f32,
    gelu_f32,
    xielu_f32,
    swiglu_clamped_f32,
    reglu_f32,
    soft_cap_f32,
    cut_off_f32,
    predict_streams_f32,
    correct_streams_f32,
    match_size_f32,
    add_f32,
    gate_f32,
    delta_net_f32,
    delta_net_chunks_f32,
    ssd_f32,
    selective_scan_f32,
    wkv_f32,
    wkv6_f32,
    key_decays_f32,
    row_decays_f32,
    multiply_f32,
    convolve_f32,
    scale_f32,
    load_f32_f16,
    store_kv_row_f32,
    add_kv_rows_f32,
    add_kv_squares_f32,
    score_blocks_f32,
    index_scores_f32,
    softmax_factors_f32,
    merge_softmax_f32,
    attention_rows_f32,
    peak_q8<4>,
    peak_q8<8>,
    peak_read,
};
#undef EH2O_SIGNED

}  // namespace edgeh2o::EH2O_ISA
