// The layer loop on a device (cpp/model/decoder.h is that of the CPU): layer by layer for all rows of a call,
// as there, because a sparse rule chooses between the chunks of a layer.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda/device_weights.h"
#include "model/decoder_config.h"
#include "model/layer_call.h"
#include "sequence/sequence.h"

namespace edgeh2o::cuda {

// Throws std::invalid_argument that names the first thing which kernels for the device are missing of.
void check_supported(const DecoderConfig& config);

// The factor of a query at position p, 1 + scale * ln(1 + floor(p / period)), of all layers that have one.
struct Temperature {
  float scale = 0.0f;
  size_t period = 0;  // 0: none
};
Temperature temperature_of(const DecoderConfig& config);

// Rows that pass linear layers together, those of them that attend together, and of logits: memory grows with
// the context for the second and with the vocabulary for the third.
inline constexpr size_t kRowsAtOnce = 512, kAttendRows = 8, kLogitRows = 8;

// The state of a prompt on the device: the caches of all layers, and what calls write to. The host's Sequence
// keeps the books; the rows of its own cache are only filled when asked for (download_rows).
class DeviceState {
 public:
  DeviceState(Device& device, const DecoderConfig& config, const SequenceShape& shape,
              const PolicyNeeds& needs);
  static size_t cache_bytes(const DecoderConfig& config, const SequenceShape& shape);
  static size_t recurrent_bytes(const DecoderConfig& config);
  struct BufferBytes {
    size_t device, pinned;
  };
  static BufferBytes buffer_bytes(const DecoderConfig& config, const SequenceShape& shape,
                                  const PolicyNeeds& needs);

  DeviceCache cache(size_t layer) const;  // that of another layer, where its keys and values are
  // Rows of a layer that a rule looks at: those up to `end` that the sequence has not got yet.
  void copy_rows_to_host(Sequence& sequence, size_t layer, size_t end);
  // A call writes the rows from its position on. Recurrent states that the sequence has replaced (a prompt
  // begins, or one is taken up) go to the device.
  void begin_call(Sequence& sequence);
  void end_call() { moved_states_ = true; }
  // Recurrent states from the device to the sequence, as they are to be saved.
  void download_states(Sequence& sequence);
  // The position of the call's first row, and its tokens.
  const uint32_t* start() const { return inputs_.as<uint32_t>(); }
  const int32_t* tokens() const { return inputs_.as<int32_t>() + 1; }
  // Where a call stages the cosines of a rope, and behind them its sines, in buffers as large as on the
  // device; behind the last rope the factors of the queries.
  uint8_t* staged_rope(size_t i) const {
    size_t offset = inputs_.size();
    for (size_t before = 0; before < i; ++before) offset += ropes_[before].size();
    return staged_.as<uint8_t>() + offset;
  }
  // The numbers of a recurrent layer.
  float* recurrent(size_t layer) const { return recurrent_[layer].as<float>(); }
  // The rows of all tokens from the device to the sequence, or back.
  void download_rows(Sequence& sequence);
  void upload_rows(Sequence& sequence);

 private:
  friend class DeviceDecoder;
  size_t source(size_t layer) const { return layer - config_.layers[layer].heads.kv_distance; }
  template <typename F>
  void for_each_row_range(Sequence& sequence, size_t layer, PositionRange range, const F& f);

  Device& device_;
  const DecoderConfig& config_;
  SequenceShape shape_;
  struct Cache {  // not of one piece, which long contexts would make a large one
    DeviceBuffer k, v;
  };
  std::vector<Cache> caches_;
  std::vector<DeviceBuffer> recurrent_;  // states
  // How often the sequence had replaced the recurrent state that a layer has on the device; whether calls
  // have moved them on since they were downloaded.
  std::vector<size_t> n_replaced_;
  bool moved_states_ = false;
  // Of all rows of a call: x_, qkv_, attended_; of kRowsAtOnce: norm_ to d8_; the widest layer counts.
  // Of kRowsAtOnce: what recurrent layers make of their input, or latent attention has between its products;
  // what was convolved.
  DeviceBuffer mixed_, convolved_;
  DeviceBuffer x_, qkv_, attended_, norm_, gate_, up_, q8_, d8_, parts_, states_, inputs_, logits_;
  // Of a sparse rule, of one layer: positions [n_kv_heads][max_context], then counts; states of both parts of
  // a chunk, [2][chunk][n_heads][2]; column sums, [n_kv_heads] of the chunk, then of the memory; synthetic
  // rows; bounds of the pages of a KV head, and the queries that meet them.
  DeviceBuffer memory_, joined_, sums_, synthetic_, bounds_, signs_;
  // Of the guard: what sampled queries get that read everything; on the host what all got before, then this.
  DeviceBuffer sampled_, staged_sampled_;
  DeviceBuffer staged_memory_, staged_sums_, staged_synthetic_, staged_queries_;  // pinned
  std::vector<size_t> n_on_host_;                                                 // rows of every cache
  // Of experts, of kRowsAtOnce: normed rows, logits of the router, outputs of all experts of a row; which
  // rows an expert has, and what goes into a row.
  DeviceBuffer expert_input_, router_, expert_outputs_, routes_;
  DeviceBuffer staged_router_, staged_routes_;  // pinned
  std::vector<DeviceBuffer> ropes_;             // cos, then sin, of all rows of a call
  DeviceBuffer query_factors_;                  // of all rows of a call
  DeviceBuffer staged_, staged_logits_;         // pinned
  // What a generated token asks of the device, as long as its attention has so many ranges of keys.
  struct Token {
    size_t n_ranges = 0;
    bool has_logits = false;
    DeviceGraph graph;
  } token_;
};

// Called after every layer: layers done, of all.
using OnLayer = std::function<void(size_t done, size_t total)>;

class DeviceDecoder {
 public:
  DeviceDecoder(const DecoderConfig& config, const KernelTable& table, std::shared_ptr<Device> device,
                size_t block_bytes = DevicePool::kBlockBytes);

  const DecoderConfig& config() const { return config_; }
  DeviceWeights& weights() { return weights_; }
  Device& device() const { return *device_; }
  std::mutex& mutex() { return mutex_; }

  // Appends tokens to the sequence; logits [vocab_size] of the last one, unless null. As Decoder::forward.
  // Throws DeviceError too.
  void forward(Sequence& sequence, DeviceState& state, Span<const int32_t> tokens, bool is_decode,
               PromptEnd end, float* logits, const OnLayer& on_layer);
  // Logits of rows [first, first + n_rows) of the latest prefill; for a sequence with all_rows.
  void row_logits(DeviceState& state, size_t first, size_t n_rows, float* out);

 private:
  struct Rows {  // some of a call, one after the other
    Sequence& sequence;
    DeviceState& state;
    size_t first;  // in the call
    size_t n;
    size_t position;  // of the first

    Rows part(size_t begin, size_t count) const {
      return {sequence, state, first + begin, count, position + begin};
    }
    float* x(size_t dim) const { return state.x_.as<float>() + first * dim; }
    // Rows of a layer with attention: gates of what comes out, if it has them, queries, keys and values.
    float* qkv(const LayerSpec& spec) const { return state.qkv_.as<float>() + first * spec.qkv_dim(); }
    float* queries(const LayerSpec& spec) const { return qkv(spec) + spec.gate_dim(); }
    float* attended(size_t dim) const { return state.attended_.as<float>() + first * dim; }
  };
  struct Memory {  // of a chunk: what its KV heads read besides itself
    KeyList keys{}, synthetic_keys{};
    DeviceCache synthetic{};
    const float* biases = nullptr;        // of synthetic rows
    const uint32_t* is_scored = nullptr;  // null: before the first choice
    size_t most = 0, most_synthetic = 0;  // of a KV head
  };
  class DevicePageScores;

  void stage(const Rows& rows, Span<const int32_t> tokens);
  void upload_inputs(const Rows& rows);
  // Everything that a call asks of the device; end_layer, unless null, is called behind every layer.
  void launch_call(const Rows& rows, bool is_decode, PromptEnd end, bool has_logits,
                   const std::function<void(size_t layer)>& end_layer);
  // Whether all tokens ask the same, but for what is staged and the number of ranges.
  bool repeats_itself(const Sequence& sequence) const;
  void replay_token(const Rows& token, bool has_logits);
  // f(some rows) for those that pass linear layers together.
  template <typename F>
  static void for_groups(const Rows& rows, const F& f) {
    for (size_t begin = 0; begin < rows.n; begin += kRowsAtOnce) {
      f(rows.part(begin, std::min(kRowsAtOnce, rows.n - begin)));
    }
  }
  void run_layer(const Rows& rows, size_t layer, bool is_decode, PromptEnd end);
  void project_qkv(const Rows& rows, size_t layer);
  // Of latent attention: queries in the space of the rows that are cached, and these; values [n][n_heads *
  // value_dim] of what attention gives, which the next rows overwrite.
  void project_latent(const Rows& rows, size_t layer);
  float* latent_values(const Rows& rows, size_t layer);
  // What a layer has instead of attention, or beside it; rows before the outputs only move its state on. For
  // some that go through it together, these are the first n_skipped.
  void mix_recurrent(const Rows& rows, const Rows& outputs, size_t layer);
  void mix_short_conv(const Rows& rows, size_t layer, size_t n_skipped);
  void mix_delta_net(const Rows& rows, size_t layer, size_t n_skipped);
  void mix_mamba2(const Rows& rows, size_t layer, size_t n_skipped);
  void gate_and_norm(const Rows& rows, size_t layer, const float* gate, float* x);
  struct DeltaParts {
    float *qkv, *z, *gates;
  };
  void project_delta_net(const Rows& rows, const LayerWeights& w, const DeltaParts& parts,
                         const DeltaHeads& heads);
  void convolve(const Rows& rows, size_t layer, ConvolveArguments a);  // but for weights and sizes
  void rotate(const Rows& rows, size_t layer);
  void embed(const Rows& rows, const DeviceTable& table, size_t first, size_t n_columns, float scale,
             float* out);
  void add_attended(const Rows& rows, size_t layer, bool is_rounded);
  void feed_forward(const Rows& rows, size_t layer);
  void add_token_input(const Rows& rows, size_t layer);
  void scale_output(const Rows& rows, size_t layer);
  void add_experts(const Rows& rows, size_t layer);
  const float* route(const Rows& rows, const LayerSpec& spec, const LayerWeights& w);
  void run_expert(const Rows& n_rows, const LayerSpec& spec, const FeedForward& ffn, const int32_t* indices,
                  float* out);
  void gate_up(const Rows& rows, const FeedForward& ffn, Activation activation, const float* input);
  // Whether what came out was rounded to 8 bits for the output projection, instead of being floats.
  bool attend(const Rows& rows, const Rows& outputs, size_t layer, bool is_decode, PromptEnd end);
  // The 8 bits into which attention writes what it gives; nothing where that is to be floats.
  QuantisedRows rounds_to(const Rows& rows, size_t layer) const;
  // Queries read every position up to their own, or their window; out [n][out_dim], or what `rounded` has.
  void attend_to_all(const Rows& rows, size_t layer, float* out, const QuantisedRows& rounded = {});
  // Some of the rows, whose numbers are on the device too.
  void attend_to_all(const Rows& rows, size_t layer, const SampledRows& sample, const uint32_t* listed,
                     float* out);
  void attend_in_ranges(AttendArguments a, size_t layer, size_t n_keys, size_t n_rows, float* out,
                        const QuantisedRows& rounded = {});
  void attend_under_guard(const Rows& rows, size_t layer, PromptEnd end);
  void attend_by_policy(const Rows& rows, size_t layer, PromptEnd end);
  AttentionError measure_error(const Rows& rows, size_t layer, PromptEnd end);
  void attend_token(const Rows& token, size_t layer);
  void bring_past(const Rows& rows, size_t layer);
  void choose_memory(const Rows& chunk, size_t layer, Phase phase, std::vector<MemorySet>& sets);
  Memory stage_memory(const Rows& chunk, size_t layer, const std::vector<MemorySet>& sets);
  void score_pages(const Rows& chunk, size_t layer, size_t kv_head, const float* bounds, size_t n_pages,
                   float* out);
  void attend_chunk(const Rows& chunk, size_t layer, const Memory& memory, bool has_sums);
  void observe(const Rows& chunk, size_t layer, const Memory& memory, const std::vector<MemorySet>& sets);
  AttendArguments attend_arguments(const Rows& rows, size_t layer) const;
  void launch_attend(AttendArguments a, size_t n_ranges, size_t n_rows);
  // All n_splits of what was attended to, to `out` or `rounded`.
  void launch_combine(const AttendArguments& a, size_t layer, size_t n_rows, float* out,
                      const QuantisedRows& rounded = {});
  // The width of the tiles by which rows of a prompt attend, 0 if by rows.
  size_t tile_dim_of(const Rows& rows, size_t layer) const;
  // Rows [n][out_dim] that attend to the lists by tiles.
  AttendTilesArguments tiles_arguments(const Rows& rows, size_t layer, float* out) const;
  void launch_tiles(const AttendTilesArguments& a, size_t dim);
  void attend_chunk_by_tiles(const Rows& chunk, size_t layer, const Memory& memory, bool has_sums,
                             size_t dim);
  void attend_chunk_by_rows(const Rows& chunk, size_t layer, const Memory& memory, bool has_sums);
  void add_columns(const Rows& chunk, size_t layer, const Memory& memory, size_t dim);
  // Normed rows, in 8 bits and as floats in norm_, as the matrices want them; no norm if weight is empty.
  // Gives the floats.
  const float* begin_branch(const Rows& rows, const std::vector<float>& weight,
                            Span<const Linear* const> matrices);
  // x += scale * norm(linear(input)), no norm if post_norm is empty.
  void end_branch(const Rows& rows, const float* input, const Linear& linear,
                  const std::vector<float>& post_norm, float scale);
  // act(gate) * x for what multiplies it next: in 8 bits, or in place.
  void gate_by(const Rows& rows, const float* gate, size_t gate_stride, float* x, size_t dim, GateKind kind,
               const Linear& consumer);
  void quantise(const Rows& rows, const float* input, size_t dim, const Linear& consumer);
  void norm_groups(const Rows& rows, float* x, size_t dim, size_t stride, const std::vector<float>& weight,
                   float eps);
  // out [n][stride] (+)= linear(input), which is in 8 bits where the weights are quantised.
  void multiply(const Rows& rows, const Linear& linear, const float* input, float* out, size_t stride,
                bool accumulates = false);
  struct HeadRows {  // [n][stride], of every head from its step on
    float* x;
    size_t stride, step;
  };
  // out = the product of every head's matrix with its part of the input.
  void multiply_heads(const Rows& rows, const std::vector<PackedMatrix>& heads, const HeadRows& input,
                      const HeadRows& out);
  struct Product {
    const Linear* linear;
    float* out;
  };
  // The same for all of them; of a few rows those of one format go together.
  void multiply_all(const Rows& rows, Span<const Product> products, const float* input, size_t stride,
                    bool accumulates = false);
  void launch_multiply(const MultiplyArguments& a, size_t n_heads);  // heads: of a list
  bool is_quantised(const Linear& linear) const { return is_tiled(weights_.format(linear.weight)); }
  void launch_logits(DeviceState& state, const float* x, size_t n_rows);
  void read_logits(DeviceState& state, size_t n_rows, float* out);

  DecoderConfig config_;
  const KernelTable& table_;
  std::shared_ptr<Device> device_;
  DeviceWeights weights_;
  std::mutex mutex_;
};

}  // namespace edgeh2o::cuda
