// What we need of NVIDIA's driver API, declared by ourselves after its documentation: no header of a CUDA
// installation is needed to build, and none of its libraries to run without a device.
#pragma once

#include <cstddef>
#include <cstdint>

namespace edgeh2o::cuda {

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = uint64_t;
using CUcontext = struct ContextOfDriver*;
using CUmodule = struct ModuleOfDriver*;
using CUfunction = struct FunctionOfDriver*;
using CUstream = struct StreamOfDriver*;
using CUgraph = struct GraphOfDriver*;
using CUgraphExec = struct GraphExecOfDriver*;

// CUresult
inline constexpr int kCudaSuccess = 0, kCudaOutOfMemory = 2, kCudaNoDevice = 100, kCudaInvalidDevice = 101,
                     kCudaNoBinaryForGpu = 209, kCudaUnsupportedPtx = 222, kCudaNotFound = 500,
                     kCudaIllegalAddress = 700, kCudaLaunchFailed = 719, kCudaSystemNotReady = 802,
                     kCudaCaptureUnsupported = 900;
// CUdevice_attribute
inline constexpr int kAttributeClockRate = 13, kAttributeProcessors = 16, kAttributeIntegrated = 18,
                     kAttributeComputeMajor = 75, kAttributeComputeMinor = 76,
                     kAttributeSharedMemoryOptIn = 97;
// CUfunction_attribute
inline constexpr int kFunctionMaxDynamicSharedBytes = 8;
// Flags of cuStreamCreate: does not wait for the default stream.
inline constexpr unsigned kStreamNonBlocking = 1;
// CUstreamCaptureMode: other threads may go on allocating.
inline constexpr int kCaptureThreadLocal = 1;

// Result, name, parameters. Names are those that the library exports, of the newest version of each function
// that CUDA 11.4, the oldest on Jetson with these kernels, has.
#define EH2O_DRIVER_FUNCTIONS(X)                                                                  \
  X(cuInit, (unsigned flags))                                                                     \
  X(cuDriverGetVersion, (int* version))                                                           \
  X(cuDeviceGetCount, (int* count))                                                               \
  X(cuDeviceGet, (CUdevice * device, int ordinal))                                                \
  X(cuDeviceGetName, (char* name, int n_bytes, CUdevice device))                                  \
  X(cuDeviceGetAttribute, (int* value, int attribute, CUdevice device))                           \
  X(cuDevicePrimaryCtxRetain, (CUcontext * context, CUdevice device))                             \
  X(cuDevicePrimaryCtxRelease_v2, (CUdevice device))                                              \
  X(cuCtxSetCurrent, (CUcontext context))                                                         \
  X(cuMemGetInfo_v2, (size_t * free, size_t * total))                                             \
  X(cuMemAlloc_v2, (CUdeviceptr * pointer, size_t n_bytes))                                       \
  X(cuMemFree_v2, (CUdeviceptr pointer))                                                          \
  X(cuMemHostAlloc, (void** pointer, size_t n_bytes, unsigned flags))                             \
  X(cuMemFreeHost, (void* pointer))                                                               \
  X(cuMemcpyHtoDAsync_v2, (CUdeviceptr to, const void* from, size_t n_bytes, CUstream stream))    \
  X(cuMemcpyDtoHAsync_v2, (void* to, CUdeviceptr from, size_t n_bytes, CUstream stream))          \
  X(cuStreamCreate, (CUstream * stream, unsigned flags))                                          \
  X(cuStreamDestroy_v2, (CUstream stream))                                                        \
  X(cuStreamSynchronize, (CUstream stream))                                                       \
  X(cuStreamBeginCapture_v2, (CUstream stream, int mode))                                         \
  X(cuStreamEndCapture, (CUstream stream, CUgraph * graph))                                       \
  X(cuGraphInstantiateWithFlags, (CUgraphExec * exec, CUgraph graph, unsigned long long flags))   \
  X(cuGraphDestroy, (CUgraph graph))                                                              \
  X(cuGraphExecDestroy, (CUgraphExec exec))                                                       \
  X(cuGraphLaunch, (CUgraphExec exec, CUstream stream))                                           \
  X(cuModuleLoadData, (CUmodule * module, const void* image))                                     \
  X(cuModuleUnload, (CUmodule module))                                                            \
  X(cuModuleGetFunction, (CUfunction * function, CUmodule module, const char* name))              \
  X(cuFuncSetAttribute, (CUfunction function, int attribute, int value))                          \
  X(cuLaunchKernel, (CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,      \
                     unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes, \
                     CUstream stream, void** arguments, void** extra))                            \
  X(cuGetErrorName, (CUresult error, const char** text))                                          \
  X(cuGetErrorString, (CUresult error, const char** text))

}  // namespace edgeh2o::cuda
