// The weights of a decoder, packed for one kernel table, and the names by which a model file fills them.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/arena.h"
#include "base/mapped_file.h"
#include "isa/kernel_table.h"
#include "model/decoder_config.h"
#include "model/read_ahead.h"
#include "model/row_table.h"
#include "quant/packed_matrix.h"
#include "quant/widened_types.h"

namespace edgeh2o {

struct Linear {
  PackedMatrix weight;      // [n_out][n_in]
  std::vector<float> bias;  // [n_out], or empty
  // [1], or empty: factor of what the matrix makes. Only layers with has_sub_norms have some.
  std::vector<float> scale;
};

struct FeedForward {
  Linear gate, up, down;  // [ffn_dim], [ffn_dim], [model_dim] outputs
};

// Of the time mix of RWKV-7: what parts of the difference to the token before make the inputs of queries,
// decays, keys, values, rates and gates, [model_dim] each; matrices of as many outputs, or two with a vector
// between; biases and factors [model_dim]. Of RWKV-6 the inputs of decays, keys, values, queries and gates,
// whose parts are made of the input and `first_shares` of the difference by way of five vectors of shift_rank
// numbers, which are one product; gates are one matrix.
struct TimeMix {
  std::array<std::vector<float>, 6> shares;
  std::vector<float> first_shares;
  Linear shifts_in;
  std::array<Linear, 5> shifts_out;
  Linear queries, keys, values, output;
  Linear decays_in, decays_out, rates_in, rates_out, values_in, values_out, gates_in, gates_out;
  std::vector<float> decay_bias, rate_bias, value_bias, direction_factors, key_factors, bonus;
  std::vector<float> norm, norm_bias;
  std::vector<float> ones;
};

// What a branch reads of streams that are mixed: [n_streams * model_dim] norms of each, [stream_rank] and
// [n_streams * model_dim] outputs of what multiplies them, and [n_streams] of what the branch gives goes to
// each (not of the output's).
struct StreamMixer {
  std::vector<float> norm;
  Linear down, up, shares;
};

// Of n-grams: [n_streams * model_dim] and [model_dim] outputs of what was looked up, norms of these keys, of
// the streams and of what is convolved, and the convolution, [n_taps][n_streams * model_dim].
struct NgramWeights {
  Linear key, value;
  std::vector<float> key_norm, query_norm, conv_norm, conv;
};

struct LayerWeights {
  std::vector<float> attn_norm, attn_post_norm;      // [model_dim], or empty
  std::vector<float> attn_norm_bias, ffn_norm_bias;  // [model_dim], or empty
  // [model_dim], or empty: of the residual stream behind each branch.
  std::vector<float> attn_sum_norm, attn_sum_norm_bias, ffn_sum_norm, ffn_sum_norm_bias;
  std::vector<float> second_norm, second_norm_bias;  // [model_dim], or empty: of has_second_norm
  // [q_gate_dim + q_dim], the gate first, [k_dim], [v_dim], [model_dim] outputs; [gate_dim], where the gate
  // has a matrix of its own.
  Linear attn_q, attn_k, attn_v, attn_output, attn_gate;
  std::vector<float> attn_qkv_bias;  // of the first three, in place of their own; or empty
  std::vector<float> key_balance;    // [q_dim + k_dim] factors (model/key_balance.h), or empty
  std::vector<float>
      key_factors;  // of cached keys, [k_dim] or [key_dim] of every head; or empty: as projected
  std::vector<float> head_gains, query_gains;      // [n_heads] and, made of it, [q_dim]; or empty
  std::vector<float> embedding_share;              // [1], or empty: of the embedding, behind the layer
  std::vector<float> attn_sub_norm, ffn_sub_norm;  // [out_dim], [ffn_dim], or empty: of has_sub_norms
  bool has_even_keys = false;                      // by these, or by factors in the norms of queries and keys
  // Of latent attention: the vectors that queries are made of, [q_rank] outputs, and the row that is cached,
  // [row_dim]; attn_q makes [n_heads * head_dim] of the former or of the input.
  Linear attn_q_a, attn_kv_a;
  std::vector<float> attn_q_a_norm, attn_kv_a_norm;  // [q_rank], or empty, and [rank]
  std::vector<PackedMatrix> attn_k_b, attn_v_b;      // per head [rank][nope_dim], [value_dim][rank]
  // Of a lightning indexer: [n_heads * key_dim] of the vectors that queries are made of, [key_dim] and
  // [n_heads] of the input; the norm of its keys, [key_dim].
  Linear index_q, index_k, index_weights;
  std::vector<float> index_k_norm, index_k_norm_bias;
  // Of one that scores blocks: both are made of the input, and have norms of [key_dim]; heads count alike.
  std::vector<float> index_q_norm, index_ones;
  Linear conv_in, conv_out;  // [3 * model_dim], [model_dim], of a short convolution
  std::vector<float> conv;   // [n_conv_taps][channels], the latest token's last
  // Where queries, keys and values of a delta net have one each in the file; conv is made of them.
  std::array<std::vector<float>, 3> conv_parts;
  // Of a delta net: [conv_dim], or attn_q, attn_k and attn_v in its place, [value_dim], [model_dim] outputs;
  // the gates, [n_value_heads] and [n_decays], or both in one matrix.
  Linear delta_qkv, delta_z, delta_out, delta_rate, delta_decay, delta_gates;
  Linear delta_z_a, delta_decay_a;  // [gate_rank], of which delta_z and delta_decay are made then
  std::vector<float> delta_a, delta_bias, delta_norm;     // [n_value_heads], [n_decays], [head_dim]
  std::vector<float> delta_q_scale, delta_k_scale;        // [head_dim] factors of normed queries and keys
  std::vector<float> attn_q_norm, attn_k_norm;            // [key_dim] or [q_dim] and [k_dim], or empty
  std::vector<float> attn_q_norm_bias, attn_k_norm_bias;  // [q_dim], [k_dim] of LayerNorm, or empty
  std::vector<float> attn_sinks;                          // [n_heads], or empty
  std::vector<float> attn_v_norm;                         // [value_dim] ones, where values are normed
  std::vector<float> ffn_norm, ffn_post_norm;             // [model_dim], or empty
  std::vector<FeedForward> ffn;                           // one, or one per expert
  Linear ffn_router;                                      // [n_experts] outputs, where there are experts
  std::vector<float> ffn_router_bias;                     // [n_experts], or empty
  FeedForward ffn_shared;                                 // where the layer has a shared expert
  std::vector<FeedForward> ffn_adjugates;                 // [n_adjugates]
  std::vector<float> ffn_shared_gate;                     // [model_dim], or empty
  // Where experts have norms of their own: [model_dim] each, and factors of experts, [n_experts] or empty.
  std::vector<float> ffn_router_norm, ffn_expert_norm, ffn_expert_post_norm, ffn_shared_post_norm;
  std::vector<float> ffn_expert_scale;
  // The input of the layer per token: what it is of the embedding, how much of it, and where it goes.
  Linear token_input_proj;                   // [token_input_dim] outputs
  Linear token_input_gate, token_input_out;  // [token_input_dim], [model_dim] outputs
  std::vector<float> token_input_post_norm;  // [model_dim], or empty
  std::vector<float> output_scale;           // [1], or empty
  Linear laurel_in, laurel_out;              // [laurel_rank], [model_dim] outputs
  std::vector<float> laurel_post_norm;       // [model_dim], or empty
  // Of several residual streams: [kStreams] outputs of a token's normed first stream; the factors that these
  // make, [kStreams][kStreams * kStreams] and [kStreams][kStreams]; and that of the layer's input per token.
  Linear stream_router;
  std::vector<float> stream_router_norm, stream_predictor, stream_corrector, stream_scale;
  // Of Mamba-2: [in_dim], [model_dim] outputs; [conv_dim], or empty; [n_heads] each; [inner_dim / n_groups]
  // of every group, or empty.
  Linear ssm_in, ssm_out;
  std::vector<float> conv_bias, ssm_a, ssm_d, ssm_bias;
  std::vector<std::vector<float>> ssm_norm;
  // Of Mamba-1, beside ssm_in and ssm_out: [projected_dim] outputs of its channels, and the [n_channels]
  // steps, made of the first of these; their norms, [step_rank] and [state_dim] each, or empty. Mamba-2 may
  // have the same: its [n_heads] rates are made of the last. ssm_a and
  // ssm_d are of its channels, as selective_scan takes them.
  Linear ssm_x, ssm_dt;
  std::vector<float> ssm_dt_norm, ssm_b_norm, ssm_c_norm;
  TimeMix time_mix;
  StreamMixer attn_mixer, ffn_mixer;
  NgramWeights ngrams;
  std::vector<float> ffn_shares;  // [model_dim] of the network's input the part of the token before, or empty
  // Of the network of RWKV-6, the same of the gate of what it gives, [model_dim] outputs.
  std::vector<float> ffn_gate_shares;
  Linear ffn_output_gate;
};

struct SlotList;

class Weights {
 public:
  // Where a tensor goes: a matrix or a vector, or several, which are kept column by column: of all rows, or
  // of so many at a time.
  struct Slot {
    PackedMatrix* matrix = nullptr;
    std::vector<float>* vector = nullptr;
    size_t rows = 0, cols = 0;
    bool is_required = true;
    bool is_transposed = false;  // the matrix is kept as [cols][rows], in floats
    size_t n_together = 0;       // rows of several vectors that lie together: [rows / n][cols][n]; 0: all

    // Where in the vector the number of a row and a column lies.
    size_t index(size_t row, size_t col) const {
      const size_t n = n_together > 0 ? n_together : rows;
      return (row / n * cols + col) * n + row % n;
    }
  };

  // main: whose embedding and output matrix serve where these have none, or null; it outlives this.
  Weights(const DecoderConfig& config, const KernelTable& table, const Weights* main = nullptr);

  // Numbers of a float type of GGUF.
  struct Floats {
    std::string type_name;
    Span<const uint8_t> data;
  };

  // Packs or converts one tensor of a GGUF file; `name` is the file's. Vectors have rows = 1. row_order: see
  // PackedMatrix (for a vector: the source element of every element), or null.
  // Throws std::invalid_argument for an unknown name, a wrong shape or an unsupported type.
  void set_tensor(const std::string& name, const std::string& type_name, const uint8_t* data, size_t n_bytes,
                  size_t rows, size_t cols, const int32_t* row_order);

  // How many rows of a tensor set_rows takes at once, so that they are about max_bytes: all of them where a
  // tensor is not packed row by row.
  size_t rows_at_once(const std::string& name, size_t n_bytes, size_t rows, size_t cols,
                      const int32_t* row_order, size_t max_bytes) const;
  // set_tensor for n_rows of its rows, from row `first`, a multiple of rows_at_once, on. Parts are given in
  // ascending order.
  void set_rows(const std::string& name, const std::string& type_name, const uint8_t* data, size_t n_bytes,
                size_t rows, size_t cols, size_t first, size_t n_rows);

  // A matrix that was packed before: the type of its tensor, that which it has in memory and its shape, and
  // where its panels begin in a file.
  struct PackedTensor {
    std::string name, tensor_type, packed_type;
    size_t rows, cols, offset;
  };
  // Lets these matrices lie in the file, which was packed for the same layout, instead of being set. What the
  // file says is not trusted: throws std::invalid_argument, before anything is changed, for a matrix that has
  // no such place in the decoder or in the file. Where all that is mapped is_beyond_memory, its pages may be
  // gone when they are needed again.
  void map_packed(MappedFile file, const std::vector<PackedTensor>& tensors, bool is_beyond_memory);
  // Takes one of these into memory: its bytes begin at `offset` of an open descriptor. Throws
  // std::system_error, std::bad_alloc.
  void hold_packed(const std::string& name, int descriptor, uint64_t offset);
  // Has the mapped matrices, once finish() was called, read before they are multiplied; null where none are.
  const ReadAhead* read_ahead() const { return read_ahead_.get(); }
  // The matrix of a tensor. Throws std::invalid_argument for a name that is none's, or was not set.
  const PackedMatrix& find_packed(const std::string& name) const;

  // Once the matrix `name` is there: adds B A to it in products of rows in which the adapter counts. a:
  // [rank][cols], b: [rows][rank], in floats of their types, any factor in b. Those of a matrix are given by
  // ascending adapters. Throws std::invalid_argument for a name that is none of a matrix that rows are
  // multiplied with, an adapter that the model has not got, or other shapes and types.
  void add_update(const std::string& name, size_t adapter, size_t rank, const Floats& a, const Floats& b);

  // Throws std::invalid_argument that lists the required tensors that are missing: those that are not filled
  // here, or for which is_filled, if it is given, says so.
  void check_complete(const std::function<bool(const Slot&)>& is_filled = {}) const;

  // Once everything is set: check_complete, and what follows from the weights.
  void finish();
  // Whether keys are cached in other sizes than the projections make them.
  bool balances_keys() const;

  // The tensor `name` as floats, row by row; its shape goes to rows and cols. Throws std::invalid_argument
  // for an unknown name and a tensor that was not set.
  std::vector<float> dequantize(const std::string& name, size_t* rows, size_t* cols) const;

  // Adds every tensor the decoder knows to `list`; the one place that names them, with list_mixer.
  void list_tensors(const SlotList& list);

  // The tensor's place, by its name and shape. Throws std::invalid_argument for an unknown name or another
  // shape.
  const Slot& find_slot(const std::string& name, size_t rows, size_t cols) const;
  const std::unordered_map<std::string, Slot>& slots() const { return slots_; }

  const PackedMatrix& output() const {
    if (head_) return head_;
    return output_.weight ? output_.weight : token_embd_.weight;
  }
  // Whose rows tokens are looked up in. What joins a hidden row as it is has those of its model, and its own
  // for logits.
  const PackedMatrix& token_embd() const {
    const bool is_own = !main_ || (token_embd_.weight && !config_.joins(HiddenJoin::kPlain));
    return is_own ? token_embd_.weight : main_->token_embd_.weight;
  }
  // Of a layer that guesses tokens ahead: what makes its input of both normed parts, and their norms.
  const Linear& hidden_proj() const { return hidden_proj_; }
  // What makes the hidden row of the next guess of what logits are made of, where that has another width.
  const Linear& hidden_out() const { return hidden_out_; }
  // What makes the row beside a token of rows of the other model, and their norm, which may be empty.
  const Linear& features() const { return features_; }
  const std::vector<float>& features_norm() const { return features_norm_; }
  const std::vector<float>& embedding_norm() const { return embedding_norm_; }
  const std::vector<float>& hidden_norm() const { return hidden_norm_; }
  // [model_dim] each, or empty: the norm of embeddings.
  const std::vector<float>& token_norm() const { return token_norm_; }
  const std::vector<float>& token_norm_bias() const { return token_norm_bias_; }
  const std::vector<float>& token_type() const { return token_type_; }  // [model_dim], or empty
  // [model_dim] what the state of the first stack begins with, of a model with two states.
  const std::vector<float>& first_state() const { return first_state_; }
  // [n_positions][model_dim], or not set.
  const PackedMatrix& position_embd() const { return position_embd_; }
  const std::vector<float>& ones() const { return ones_; }
  // [vocab], or null.
  const float* output_bias() const { return output_.bias.empty() ? nullptr : output_.bias.data(); }
  const PackedMatrix& own_output() const { return output_.weight; }  // not set where it is the embedding
  const std::vector<float>& output_norm() const { return output_norm_; }
  const std::vector<float>& output_norm_bias() const { return output_norm_bias_; }  // may be empty
  // [vocab][n_layers * width], in parts of DecoderConfig::token_input_rows tokens: it is the largest tensor
  // by far.
  const std::vector<PackedMatrix>& token_inputs() const { return token_inputs_; }
  const std::vector<float>& token_input_norm() const { return token_input_norm_; }  // [width]
  // What makes every other residual stream of the embedding, and what it becomes behind the last layer.
  const std::vector<PackedMatrix>& streams_in() const { return streams_in_; }
  const std::vector<PackedMatrix>& streams_out() const { return streams_out_; }
  // What logits are made of, where streams are mixed.
  const StreamMixer& output_mixer() const { return output_mixer_; }
  // The table of n-grams, which stays in the model's file.
  const RowTable& ngram_rows() const { return ngram_rows_; }
  void set_ngram_rows(RowTable table);  // throws std::invalid_argument for one of another shape
  const LayerWeights& layer(size_t i) const { return layers_[config_.own_layer(i)]; }
  const KernelTable& table() const { return *table_; }
  size_t n_bytes() const { return n_bytes_; }
  size_t n_mapped_bytes() const { return n_mapped_bytes_; }  // of these, those that map_packed gave

 private:
  void set_matrix(PackedMatrix& matrix, const FormatInfo& info, const uint8_t* data, size_t n_bytes,
                  size_t rows, size_t cols, const int32_t* row_order);
  void plan_reads();

  DecoderConfig config_;
  const KernelTable* table_;
  const Weights* main_;
  MappedFile mapped_;
  bool is_beyond_memory_ = false;
  std::unique_ptr<ReadAhead> read_ahead_;
  BlockPool pool_;  // of all matrices; a tensor that is set again leaves its old place unused
  Linear token_embd_, output_, hidden_proj_, hidden_out_, features_;
  PackedMatrix head_;  // the first rows of main's output matrix
  std::vector<float> features_norm_, embedding_norm_, hidden_norm_, first_state_, token_norm_,
      token_norm_bias_, token_type_;
  PackedMatrix position_embd_;
  std::vector<float> ones_;  // [model_dim], where embeddings are normed without weights
  std::vector<PackedMatrix> token_inputs_, streams_in_, streams_out_;
  StreamMixer output_mixer_;
  RowTable ngram_rows_;
  std::vector<float> output_norm_, output_norm_bias_, token_input_norm_;
  std::vector<LayerWeights> layers_;  // of DecoderConfig::n_own_layers
  std::unordered_map<std::string, Slot> slots_;
  std::unordered_map<PackedMatrix*, LowRankUpdates> updates_;
  size_t n_bytes_ = 0, n_mapped_bytes_ = 0;
};

}  // namespace edgeh2o
