#include "cuda/host/block.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/half.h"

namespace edgeh2o::cuda::host {
namespace {

constexpr unsigned kWarp = Block::kWarp;

int8_t byte_of(uint32_t word, unsigned i) { return static_cast<int8_t>(word >> (8 * i)); }
float half_of(uint32_t word, unsigned i) { return f32_from_f16(static_cast<uint16_t>(word >> (16 * i))); }

// The fragments of mma m16n8k32 (s8) and m16n8k16 (f16), PTX ISA 9.7.14: register i of A of lane l holds row
// l / 4 + 8 (i % 2), and the pieces of a row that lie at l % 4, further ones 4 behind.
void multiply_s8(Lane* lanes) {
  int8_t a[16][32], b[8][32];
  for (unsigned l = 0; l < kWarp; ++l) {
    for (unsigned i = 0; i < 4; ++i) {
      for (unsigned e = 0; e < 4; ++e) {
        a[l / 4 + i % 2 * 8][l % 4 * 4 + i / 2 * 16 + e] = byte_of(lanes[l].in[i], e);
        if (i < 2) b[l / 4][l % 4 * 4 + i * 16 + e] = byte_of(lanes[l].in[4 + i], e);
      }
    }
  }
  for (unsigned l = 0; l < kWarp; ++l) {
    for (unsigned i = 0; i < 4; ++i) {
      const unsigned row = l / 4 + i / 2 * 8, col = l % 4 * 2 + i % 2;
      int32_t sum = 0;
      for (unsigned k = 0; k < 32; ++k) sum += a[row][k] * b[col][k];
      lanes[l].out[i] = lanes[l].in[6 + i] + static_cast<uint32_t>(sum);
    }
  }
}

void multiply_f16(Lane* lanes) {
  float a[16][16], b[8][16];
  for (unsigned l = 0; l < kWarp; ++l) {
    for (unsigned i = 0; i < 4; ++i) {
      for (unsigned e = 0; e < 2; ++e) {
        a[l / 4 + i % 2 * 8][l % 4 * 2 + i / 2 * 8 + e] = half_of(lanes[l].in[i], e);
        if (i < 2) b[l / 4][l % 4 * 2 + i * 8 + e] = half_of(lanes[l].in[4 + i], e);
      }
    }
  }
  for (unsigned l = 0; l < kWarp; ++l) {
    for (unsigned i = 0; i < 4; ++i) {
      const unsigned row = l / 4 + i / 2 * 8, col = l % 4 * 2 + i % 2;
      float sum;
      std::memcpy(&sum, &lanes[l].in[6 + i], 4);
      for (unsigned k = 0; k < 16; ++k) sum = std::fma(a[row][k], b[col][k], sum);
      std::memcpy(&lanes[l].out[i], &sum, 4);
    }
  }
}

}  // namespace

thread_local Block* current_block = nullptr;

std::string Block::run(const std::function<void()>& kernel, const Grid& grid, unsigned n_threads,
                       size_t shared_bytes, uint64_t seed) {
  if (n_threads == 0 || n_threads % kWarp != 0 || n_threads > 1024) return "a block must be of whole warps";
  random_.seed(seed);
  kernel_ = &kernel;
  error_.clear();
  if (lanes_.size() < n_threads) lanes_ = std::vector<Lane>(n_threads);
  Block* const outer = std::exchange(current_block, this);
  std::vector<unsigned> order(size_t{grid.x} * grid.y * grid.z);
  for (unsigned i = 0; i < order.size(); ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), random_);
  for (const unsigned i : order) {
    index_ = {i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y};
    run_block(n_threads, shared_bytes);
    if (!error_.empty()) break;
  }
  current_block = outer;
  return error_;
}

void Block::run_block(unsigned n_threads, size_t shared_bytes) {
  // Of its own size, so that a checker sees what lies beside it; never zero.
  const std::unique_ptr<uint8_t[]> memory(new uint8_t[shared_bytes + 16]);
  shared_ = memory.get() + (-reinterpret_cast<uintptr_t>(memory.get()) & 15);
  std::memset(memory.get(), static_cast<int>(0x71 + random_() % 8), shared_bytes + 16);
  poison(shared_ + shared_bytes,
         static_cast<size_t>(memory.get() + shared_bytes + 16 - (shared_ + shared_bytes)));
  for (unsigned i = 0; i < n_threads; ++i) {
    lanes_[i].state = Lane::State::kReady;
    lanes_[i].copies.clear();
    lanes_[i].committed.clear();
    lanes_[i].fiber.prepare(&Block::enter, this);
  }
  std::vector<unsigned> order(n_threads / kWarp);
  for (unsigned i = 0; i < order.size(); ++i) order[i] = i;
  for (bool is_done = false; !is_done && error_.empty();) {
    std::shuffle(order.begin(), order.end(), random_);
    for (const unsigned warp : order) {
      if (!run_warp(warp)) break;
    }
    if (!error_.empty()) break;
    size_t n_done = 0;
    for (unsigned i = 0; i < n_threads; ++i) n_done += lanes_[i].state == Lane::State::kDone;
    is_done = n_done == n_threads;
    if (!is_done && n_done > 0) error_ = "some threads end where others wait at a barrier";
    for (unsigned i = 0; i < n_threads && !is_done; ++i) lanes_[i].state = Lane::State::kReady;
  }
  unpoison(memory.get(), shared_bytes + 16);
}

// Until all lanes are at the barrier of the block, or at their end. False after an error.
bool Block::run_warp(unsigned warp) {
  Lane* lanes = &lanes_[warp * kWarp];
  for (;;) {
    // Another rotation and direction every time: lanes that share memory without a barrier get caught.
    const auto order = static_cast<unsigned>(random_());
    first_of_warp_ = warp * kWarp;
    start_ = order & 31;
    flip_ = order >> 8 & 31;
    n_taken_ = 0;
    is_from_main_ = true;
    if (Lane* const first = take_next()) main_.switch_to(first->fiber);
    if (!error_.empty()) return false;
    unsigned n_collective = 0;
    for (unsigned l = 0; l < kWarp; ++l) n_collective += lanes[l].state == Lane::State::kAtCollective;
    if (n_collective == 0) return true;
    for (unsigned l = 0; l < kWarp; ++l) {
      if (n_collective < kWarp || lanes[l].collective != lanes[0].collective) {
        error_ = "the lanes of a warp do not meet at the same operation";
        return false;
      }
    }
    exchange(warp);
    if (!error_.empty()) return false;
    for (unsigned l = 0; l < kWarp; ++l) lanes[l].state = Lane::State::kReady;
  }
}

void Block::exchange(unsigned warp) {
  Lane* lanes = &lanes_[warp * kWarp];
  const Collective collective = lanes[0].collective;
  switch (collective) {
    case Collective::kSyncWarp:
      return;
    case Collective::kShuffleXor:
      for (unsigned l = 0; l < kWarp; ++l) lanes[l].out[0] = lanes[l ^ lanes[l].in[1]].in[0];
      return;
    case Collective::kLoadMatrix:
    case Collective::kLoadMatrixTransposed:
      for (unsigned l = 0; l < kWarp; ++l) {
        if (reinterpret_cast<uintptr_t>(lanes[l].row) % 16 != 0) error_ = "a row of ldmatrix is not aligned";
      }
      for (unsigned m = 0; m < 4 && error_.empty(); ++m) {
        for (unsigned l = 0; l < kWarp; ++l) {
          uint16_t pair[2];
          for (unsigned e = 0; e < 2; ++e) {
            const unsigned down = collective == Collective::kLoadMatrix ? l / 4 : l % 4 * 2 + e;
            const unsigned along = collective == Collective::kLoadMatrix ? l % 4 * 2 + e : l / 4;
            pair[e] = static_cast<const uint16_t*>(lanes[m * 8 + down].row)[along];
          }
          lanes[l].out[m] = pair[0] | uint32_t{pair[1]} << 16;
        }
      }
      return;
    case Collective::kMmaS8:
      return multiply_s8(lanes);
    case Collective::kMmaF16:
      return multiply_f16(lanes);
  }
}

void Block::enter(void* self) {
  auto* block = static_cast<Block*>(self);
  Lane& lane = block->lanes_[block->current_];
  lane.fiber.arrived_from(block->is_from_main_ ? &block->main_ : nullptr);
  (*block->kernel_)();
  lane.state = Lane::State::kDone;
  block->leave(lane);
}

void Block::fail(const std::string& message) {
  error_ = message;
  lane().fiber.switch_to(main_);
  __builtin_unreachable();
}

}  // namespace edgeh2o::cuda::host
