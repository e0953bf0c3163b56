// Runs kernels on the CPU as a GPU would: the threads of a block are fibers, those of a warp meet where they
// exchange values, and what a GPU leaves open is taken at random: the order of blocks, of warps and of the
// lanes of a warp, the contents of shared memory, and when a copy of cp.async arrives (at its wait, the
// latest moment that a GPU could take).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cuda/host/fiber.h"

namespace edgeh2o::cuda::host {

// What the 32 lanes of a warp do together.
enum class Collective : uint8_t {
  kShuffleXor,
  kSyncWarp,
  kLoadMatrix,
  kLoadMatrixTransposed,
  kMmaS8,
  kMmaF16
};

struct Lane {
  enum class State : uint8_t { kReady, kAtBarrier, kAtCollective, kDone };
  struct Copy {
    uint8_t* to;
    const uint8_t* from;
    size_t n_bytes;
  };

  Fiber fiber;
  State state = State::kReady;
  Collective collective = Collective::kSyncWarp;
  uint32_t in[10];                // operands of a collective
  const void* row;                // of a matrix that is loaded
  uint32_t out[4];                // its results
  std::vector<Copy> copies;       // of cp.async that have not arrived
  std::vector<size_t> committed;  // for each closed group of them, how many of it and those before
};

struct Grid {
  unsigned x = 1, y = 1, z = 1;
};

class Block {
 public:
  static constexpr unsigned kWarp = 32;

  // Runs `kernel` for every block of the grid. The empty string, or what was wrong: lanes that do not meet,
  // an address that is not aligned.
  std::string run(const std::function<void()>& kernel, const Grid& grid, unsigned n_threads,
                  size_t shared_bytes, uint64_t seed);

  // For the code that runs on a lane.
  Lane& lane() { return lanes_[current_]; }
  unsigned thread() const { return current_; }
  const Grid& index() const { return index_; }
  uint8_t* shared() const { return shared_; }
  void wait(Lane::State state) {
    Lane& self = lane();
    self.state = state;
    leave(self);
  }
  [[noreturn]] void fail(const std::string& message);

 private:
  void run_block(unsigned n_threads, size_t shared_bytes);
  bool run_warp(unsigned warp);
  void exchange(unsigned warp);
  // The next lane of the round that can run, or nullptr.
  Lane* take_next() {
    while (n_taken_ < kWarp) {
      const unsigned thread = first_of_warp_ + ((n_taken_++ + start_) % kWarp ^ flip_);
      if (lanes_[thread].state != Lane::State::kReady) continue;
      current_ = thread;
      return &lanes_[thread];
    }
    return nullptr;
  }
  // From lane to lane: by way of run_warp it would take two changes of stacks for one.
  void leave(Lane& self) {
    Lane* const next = take_next();
    is_from_main_ = false;
    self.fiber.switch_to(next ? next->fiber : main_);
  }
  static void enter(void* self);

  std::vector<Lane> lanes_;
  const std::function<void()>* kernel_ = nullptr;
  Grid index_;
  uint8_t* shared_ = nullptr;
  unsigned current_ = 0;
  unsigned first_of_warp_ = 0, start_ = 0, flip_ = 0, n_taken_ = 0;  // the round of a warp that runs
  bool is_from_main_ = false;
  Fiber main_;
  std::string error_;
  std::mt19937_64 random_;
};

// The block that this thread of the host runs.
extern thread_local Block* current_block;

}  // namespace edgeh2o::cuda::host
