// All kernels: what tools/build_cuda_images.py compiles.
#include "cuda/kernels/attend.cuh"
#include "cuda/kernels/attend_tiles.cuh"
#include "cuda/kernels/gemm.cuh"
#include "cuda/kernels/multiply.cuh"
#include "cuda/kernels/recurrent.cuh"
#include "cuda/kernels/rows.cuh"
#include "cuda/kernels/selection.cuh"
#include "cuda/kernels/ssd.cuh"
