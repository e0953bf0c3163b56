#include "sparse/sparse_policy.h"

#include "base/check.h"

namespace edgeh2o {

void SparsePolicy::begin_session(const PolicyShape& shape) {
  EH2O_CHECK(!is_taken_, "this policy (", describe(), ") already serves another session; make one for each");
  allocate(shape);
  shape_ = shape;
  is_taken_ = true;
  begin_prompt();
}

}  // namespace edgeh2o
