// Rounds rows of floats to K-quants: see quant/block_quantizer.h.
#pragma once

#include <cstddef>
#include <cstdint>

namespace edgeh2o {

void quantize_q4_k(const float* weights, size_t n, uint8_t* out);
void quantize_q5_k(const float* weights, size_t n, uint8_t* out);
void quantize_q6_k(const float* weights, size_t n, uint8_t* out);

}  // namespace edgeh2o
