#include "ops/attention_plan.h"

#include <algorithm>

#include "ops/attention_buffers.h"
#include "ops/decode_attention.h"
#include "ops/error_sample.h"
#include "ops/index_choice.h"
#include "ops/page_scores.h"

namespace edgeh2o {

AttentionPlan::AttentionPlan(const KernelTable& table, const AttentionShape& shape, const PolicyNeeds& needs)
    : table(table),
      kernels(attention_kernels(table, shape.precision)),
      shape(shape),
      needs(needs),
      sizes(table, shape, needs),
      slopes(shape.heads.alibi_slopes()) {
  for (float& slope : slopes) slope *= kLog2E;
}

size_t AttentionPlan::scratch_bytes(size_t n_threads) const {
  Arena counter;
  AttentionBuffers().take(counter, shape, sizes, n_threads);
  PageScores(table, shape, needs).take_scratch(counter);
  return std::max({counter.used(), ErrorSample::scratch_bytes(*this, n_threads),
                   IndexChoice::scratch_bytes(table, shape.heads.index, shape.max_context, n_threads)});
}

}  // namespace edgeh2o
