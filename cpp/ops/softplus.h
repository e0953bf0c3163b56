// log(1 + exp(x)), which recurrent layers make rates of.
#pragma once

#include <cmath>

namespace edgeh2o {

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

}  // namespace edgeh2o
