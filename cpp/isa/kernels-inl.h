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
#include "kernels/delta_net_scores-inl.h"
//
#include "kernels/delta_net_chunks-inl.h"
#include "kernels/selective_scan-inl.h"
//
#include "kernels/row_decays-inl.h"
#include "kernels/softmax-inl.h"
#include "kernels/ssd-inl.h"
#include "kernels/streams-inl.h"
#include "kernels/wkv-inl.h"
//
#include "kernels/attention_tile-inl.h"
#include "kernels/kv_rows-inl.h"
//
#include "kernels/kv_panels-inl.h"
//
#include "kernels/weight_levels-inl.h"
//
#include "kernels/integer_panels-inl.h"
//
#include "kernels/attention_integers-inl.h"
//
#include "kernels/attention_blocks-inl.h"
//
#include "kernels/key_columns-inl.h"
//
#include "kernels/attention_rows-inl.h"
#include "kernels/indexer-inl.h"
#include "kernels/page_scores-inl.h"
//
#include "kernels/peak-inl.h"

namespace edgeh2o::EH2O_ISA {

template <typename Products, bool kExists>
constexpr AttentionKernels attention_kernels() {
  if constexpr (kExists) {
    return {Products::kValuesPerWord, kGemmF32Columns,          pack_queries<Products>, pack_keys<Products>,
            pack_values<Products>,    attention_tile<Products>, column_sums<Products>,  peak_float<Products>};
  } else {
    return {};
  }
}

}  // namespace edgeh2o::EH2O_ISA
