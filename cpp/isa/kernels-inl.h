// Every kernel, for the ISA whose simd header was included: compiled where it is named.
#include <type_traits>

#include "isa/kernel_table.h"
#include "kernels/exp-inl.h"
#include "kernels/register_tile-inl.h"
//
#include "kernels/gemm_f32-inl.h"
//
#include "kernels/gemm_f16-inl.h"
//
#include "kernels/gemm_q8-inl.h"
#include "kernels/gemv_q8-inl.h"
//
#include "kernels/gemm_words-inl.h"
//
#include "kernels/products_q8-inl.h"
#include "kernels/quantize_q8-inl.h"
#include "kernels/rows-inl.h"
//
#include "kernels/delta_net-inl.h"
//
#include "kernels/delta_net_chunks-inl.h"
#include "kernels/softmax-inl.h"
#include "kernels/ssd-inl.h"
//
#include "kernels/attention_tile-inl.h"
#include "kernels/kv_rows-inl.h"
//
#include "kernels/kv_panels-inl.h"
//
#include "kernels/attention_bytes-inl.h"
#include "kernels/byte_panels-inl.h"
//
#include "kernels/attention_blocks-inl.h"
//
#include "kernels/attention_rows-inl.h"
#include "kernels/indexer-inl.h"
#include "kernels/page_scores-inl.h"
//
#include "kernels/peak-inl.h"

namespace edgeh2o::EH2O_ISA {

static_assert(kGemmQ8Columns == kGemmF32Columns, "one panel width for all weights");

// 16 rows of 8,192 x 2,048 weights with AVX2: 5.3 ms in four tiles, 6.2 ms unpacked; 32 rows: no difference.
// Matrix instructions, which need unpacked weights, pay sooner.
inline constexpr size_t kFewRows = simd::kGemvRows * (simd::kHasMmla ? 1 : 4);

// Quants in planes of bits are stored unsigned on every ISA and converted when they are unpacked.
template <PackedFormat kFormat>
inline constexpr uint32_t kSignedBit =
    simd::Dot4<PackedTraits<kFormat>::kBits>::kSigned && PackedTraits<kFormat>::kLowBits == 8
        ? uint32_t{1} << static_cast<int>(kFormat)
        : 0;

template <PackedFormat kFormat>
inline constexpr uint32_t kWordBit =
    WordFormat<kFormat>::kExists ? uint32_t{1} << static_cast<int>(kFormat) : 0;
template <typename Products, bool kExists>
constexpr AttentionKernels attention_kernels() {
  if constexpr (kExists) {
    return {Products::kValuesPerWord, kGemmF32Columns,          pack_queries<Products>, pack_keys<Products>,
            pack_values<Products>,    attention_tile<Products>, column_sums<Products>,  peak_float<Products>};
  } else {
    return {};
  }
}

template <typename Bytes, bool kExists>
constexpr AttentionKernels byte_attention_kernels() {
  if constexpr (kExists) {
    return {4,
            kByteKeys,
            pack_byte_queries<Bytes>,
            pack_byte_keys<Bytes>,
            pack_byte_values<Bytes>,
            attention_byte_tile<Bytes>,
            byte_column_sums<Bytes>,
            peak_q8<8>};
  } else {
    return {};
  }
}

}  // namespace edgeh2o::EH2O_ISA
