// What calls of a decoder write to and nobody keeps: activations, and the scratch of every operation. One
// serves any number of sequences, one call at a time.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "base/arena.h"
#include "model/decoder_config.h"
#include "ops/experts.h"
#include "sequence/sequence.h"

namespace edgeh2o {

// cos and sin of every row of a call: both [n][rotary_dim / 2].
struct RopeTable {
  float* cos = nullptr;
  float* sin = nullptr;
};

// Sizes: n rows of a call; the widest layer counts.
struct Activations {
  Activations(const DecoderConfig& config, const KernelTable& table, size_t n_rows, size_t n_threads,
              Arena& arena);

  float* x;        // [n][model_dim] residual stream
  float* streams;  // [n][kStreams][model_dim] of a model that has them, whose layers work in x
  float* carried;  // [n][model_dim] of a model with two states that which no pass works on; of RWKV-7 the
                   // values of the first layer
  float* mixed_streams;  // [n][n_streams * model_dim] where they are mixed; x is what branches read and give
  float* shares;         // [n][n_streams] of what a branch gives goes to each
  // Of mix_rows at a time: normed streams, what multiplies them, and the vectors that this is made of.
  float *mix_norm, *mix_gate, *mix_vectors;
  int64_t* ngram_rows;  // [mix_rows][heads] of the table of n-grams
  size_t mix_rows;
  float* norm;      // [rows_at_once][model_dim] normed rows, for float weights; output of a branch that is
                    // normed or scaled
  float* qkv;       // [n][qkv_dim] of one sequence in one layer with attention
  float* mixer_in;  // [rows_at_once][mixed_dim] of a recurrent one; the same place, if no layer is both
  float* attended;  // [n][mixer_out_dim] likewise
  float* inner;     // [rows_at_once][inner_dim] of latent attention, or what a hidden row is joined in
  float* gate;      // [rows_at_once][ffn_dim]
  float* up;        // [rows_at_once][ffn_dim]
  uint8_t* packed;  // rows_at_once 8-bit rows of the widest matmul input
  std::vector<RopeTable> ropes;  // as DecoderConfig::ropes
  uint8_t* scratch;              // of every thread: the largest of an op on rows
  size_t rows_at_once;           // rows that pass the linear layers at a time

  // Of a mixture of experts, for rows_at_once rows:
  float* router;        // [rows_at_once][n_experts] logits, or of all rows where layers route by their input
  float* expert_rows;   // [rows_at_once][model_dim] input, then output of one expert
  float* expert_input;  // [rows_at_once][model_dim] normed rows
  float* mixed;         // [rows_at_once][model_dim] weighted sum of the outputs
  ExpertRoutes routes;
  int32_t* adjugate_rows;   // [rows_at_once] that go through an adjugate expert, where layers have some,
  float* adjugate_weights;  // [rows_at_once] and its share in their output

  // Of a model with adapters: what they count in rows that go together, and in those of an expert.
  const float** adapters;         // [rows_at_once], or of all rows where tokens choose
  int32_t* read_tokens;           // [n] then: what tokens are read as
  const float** expert_adapters;  // [rows_at_once]
};

class Workspace {
 public:
  // Throws std::invalid_argument for a number of threads that cannot be.
  Workspace(const DecoderConfig& config, const KernelTable& table, int n_threads);

  // Bytes of the activations for calls of n_rows rows, of sequences of so many positions.
  static size_t estimate_bytes(const DecoderConfig& config, const KernelTable& table, size_t n_rows,
                               size_t max_context, size_t n_threads);

  // Allocates for calls of n_rows rows in all, of sequences like this.
  void fit(size_t n_rows, const Sequence& sequence);

  // The same for rows whose attention takes so much scratch, and which choose nothing.
  void fit_scratch(size_t n_rows, size_t n_bytes);

  // A call of n_rows rows begins, of which nothing that earlier ones wrote is read. keeps_memory false: it
  // may come soon after a long one whose memory it wants for other things, and gives back what it does not
  // need.
  void begin_call(size_t n_rows, bool keeps_memory);

  // Bytes of the activations and the scratch that calls have written to since they were allocated or given
  // back: what memory they take, about. From any thread, also during a call.
  size_t written_bytes() const;

  int n_threads() const { return n_threads_; }
  size_t n_rows() const { return n_rows_; }
  Activations& activations() { return activations_; }
  uint8_t* attention_scratch() const { return scratch_.data(); }
  // What the rows of a call read, where layers have an indexer: it stays for those that share it.
  const ChosenPositions& chosen() const { return chosen_; }

  // Held during a call, and by whoever wants the rows of one.
  std::mutex& mutex() { return mutex_; }

  // The rows of the residual stream that a sequence's latest prefill left behind: its last n_rows tokens.
  struct LeftRows {
    const Sequence* sequence = nullptr;
    size_t n_rows = 0, end = 0;
  };
  LeftRows left;

 private:
  void fit_rows(size_t n_rows);
  void fit_bytes(size_t n_bytes);

  const DecoderConfig& config_;
  const KernelTable& table_;
  int n_threads_;
  size_t n_rows_ = 0;
  std::atomic<size_t> n_touched_rows_{0};  // by calls since the memory was given back
  std::atomic<size_t> touched_scratch_{0};
  Arena arena_;
  Activations activations_;
  AlignedBuffer scratch_, chosen_memory_;
  ChosenPositions chosen_;
  std::mutex mutex_;
};

}  // namespace edgeh2o
