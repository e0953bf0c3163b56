// AltUp (Baykal et al. 2023), as Gemma 3n has it: every token has several residual streams.
#pragma once

#include <cstddef>

namespace edgeh2o {

// Of which the layers compute the first one, and predict and correct the others.
inline constexpr size_t kStreams = 4;

}  // namespace edgeh2o
