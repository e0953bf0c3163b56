// Kernels with one fault each, and the same without: what the host device must find, and must not.
// planted FAULT runs one; "none" is the kernel as it should be. Exit code 0: the result is right.
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "cuda/kernels/warp.h"

namespace edgeh2o::cuda {
namespace {

std::string fault;
bool has(const char* name) { return fault == name; }

// Sums every block of 16 integers of x [n][128] that other threads copied: out [n][4] of each block's
// first 4.
struct Arguments {
  const int32_t* x;
  int32_t* out;
  int n;
};

EH2O_KERNEL(sum_copies, Arguments, 64) {
  EH2O_SHARED_MEMORY;
  auto* const shared = reinterpret_cast<int32_t*>(shared_memory);  // two stages of 128
  const int t = thread_index();
  const auto load = [&](int i) {
    if (t < 32) {
      const int32_t* from = a.x + 128 * i + 4 * t + (has("outside") && i == a.n - 1 ? 128 : 0);
      copy_async16(shared + 128 * (i % 2) + 4 * t, has("unaligned") ? from + 1 : from);
    }
    copy_async_commit();
  };
  load(0);
  for (int i = 0; i < a.n; ++i) {
    if (i + 1 < a.n) {
      load(i + 1);
      copy_async_wait<1>();
    } else if (!has("wait")) {
      copy_async_wait<0>();
    }
    if (!has("barrier")) sync_block();
    uint32_t sum = 0;
    const int block = t - 32;  // the other warp reads
    const bool reads = block >= 0 && block < 8;
    for (int k = 0; reads && k < 16; ++k) {
      sum += static_cast<uint32_t>(shared[128 * (i % 2) + 16 * block + k]);
    }
    if (has("shared") && block == 0) sum += static_cast<uint32_t>(shared[256]);
    uint32_t exchanged = 0;
    if (!has("diverged") || t % 2 == 0) exchanged = shuffle_xor(sum, 1);
    if (reads) a.out[8 * i + block] = static_cast<int32_t>(exchanged);
    if (!has("second barrier")) sync_block();
    if (has("left out") && t < 32) return;
  }
}

// Lanes that hand something on through shared memory.
EH2O_KERNEL(rotate_lanes, Arguments, 32) {
  EH2O_SHARED_MEMORY;
  auto* const shared = reinterpret_cast<int32_t*>(shared_memory);
  const int t = thread_index();
  shared[t] = a.x[t];
  if (!has("warp barrier")) sync_warp();
  a.out[t] = shared[(t + 1) % 32];
}

int run() {
  host::Block block;
  constexpr int kBlocks = 3;
  std::vector<int32_t> x(128 * kBlocks);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<int32_t>(i * i % 1000);
  for (uint64_t seed = 0; seed < 8; ++seed) {
    std::vector<int32_t> out(8 * kBlocks, -1), rotated(32, -1);
    const Arguments sums{x.data(), out.data(), kBlocks}, lanes{x.data(), rotated.data(), 1};
    std::string error = block.run([&] { sum_copies(sums); }, {1, 1, 1}, 64, 1024, seed);
    if (error.empty()) error = block.run([&] { rotate_lanes(lanes); }, {1, 1, 1}, 32, 128, seed);
    if (!error.empty()) {
      std::puts(error.c_str());
      return 2;
    }
    for (int i = 0; i < 8 * kBlocks; ++i) {
      int32_t sum = 0;
      for (int k = 0; k < 16; ++k) sum += x[static_cast<size_t>(16 * (i ^ 1) + k)];
      if (out[static_cast<size_t>(i)] != sum) return std::puts("wrong sums"), 3;
    }
    for (size_t i = 0; i < 32; ++i) {
      if (rotated[i] != x[(i + 1) % 32]) return std::puts("wrong lanes"), 3;
    }
  }
  return 0;
}

}  // namespace
}  // namespace edgeh2o::cuda

int main(int argc, char** argv) {
  edgeh2o::cuda::fault = argc > 1 ? argv[1] : "none";
  return edgeh2o::cuda::run();
}
