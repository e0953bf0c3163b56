// A sequence in a decoder, and the workspace that it shares with others, as Python holds them.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/parallel.h"
#include "bindings/sequence_methods.h"
#include "isa/select.h"
#include "model/decoder.h"
#include "model/mixers/attention.h"
#include "sequence/sequence.h"

namespace edgeh2o {

using PolicyPtr = std::shared_ptr<SparsePolicy>;

// A workspace, and the decoder that it serves.
struct DecoderWorkspace {
  DecoderWorkspace(std::shared_ptr<const Decoder> model, std::optional<int> n_threads)
      : decoder(std::move(model)),
        workspace(decoder->config(), decoder->weights().table(), n_threads.value_or(num_threads())) {}

  std::shared_ptr<const Decoder> decoder;
  Workspace workspace;
};
using WorkspacePtr = std::shared_ptr<DecoderWorkspace>;

// A sequence in a decoder.
struct DecoderSequence {
  DecoderSequence(WorkspacePtr shared, PolicyPtr rule, const SequenceShape& shape)
      : owner(std::move(shared)),
        policy(rule),
        sequence(decoder().weights().table(), decoder().config().keeps(), rule, shape) {
    decoder().weights().check_complete();
    const pybind11::gil_scoped_release release;  // a call at work may want it
    owner->workspace.fit(shape.batch_size, sequence);
  }

  const Decoder& decoder() const { return *owner->decoder; }
  size_t vocab_size() const { return decoder().config().n_outputs(); }
  size_t n_attending() const { return n_attending_layers(decoder().config(), sequence); }
  size_t max_decode_tokens() const { return sequence.max_decode_tokens(); }
  void forget_prompt() {
    prompt_logits = pybind11::none();
    hidden = pybind11::none();
  }
  void fetch_rows() {}
  void fetch_states() {}
  void expect_rows() {}
  pybind11::dict memory_bytes() const {
    return estimate(decoder().config(), *policy, sequence.shape(), owner->workspace.n_threads());
  }

  static pybind11::dict estimate(const DecoderConfig& config, const SparsePolicy& policy,
                                 const SequenceShape& shape, std::optional<int> n_threads) {
    const KernelTable& table = active_kernel_table();
    const auto threads = static_cast<size_t>(n_threads.value_or(num_threads()));
    return to_dict(Sequence::estimate_bytes(table, config.keeps(), policy, shape, threads),
                   Workspace::estimate_bytes(config, table, shape.batch_size, shape.max_context, threads));
  }

  WorkspacePtr owner;
  PolicyPtr policy;
  Sequence sequence;
  pybind11::object prompt_logits = pybind11::none();
  bool keeps_hidden = false;
  // What is kept: what logits are made of, of the last token of a prompt alone if so, or the residual stream
  // before these layers.
  bool keeps_last_hidden = false;
  std::vector<size_t> hidden_layers;
  pybind11::object hidden = pybind11::none();  // [n][width] of the latest call, if they are kept
  uint64_t last_call_allocations = 0;
};

// Hidden rows [n][dim], one for every token; throws std::invalid_argument for another shape.
inline const float* view_hidden(const pybind11::array_t<float, pybind11::array::c_style>& rows, size_t n,
                                size_t dim) {
  EH2O_CHECK(rows.ndim() == 2 && static_cast<size_t>(rows.shape(0)) == n &&
                 static_cast<size_t>(rows.shape(1)) == dim,
             "hidden rows must be [", n, "][", dim, "], one for every token");
  return rows.data();
}

}  // namespace edgeh2o
