// The lightning indexer of DeepSeek sparse attention (DeepSeek-V3.2, 2025, section 2.1), beside latent
// attention: small queries of the vectors that its queries are made of, one small key per token and a weight
// per head of the layer's input. Keys are normed, and the first dimensions of both are rotated. The model as
// published also turns both by a Hadamard matrix before it rounds them to 8 bits; nothing is rounded so here,
// and their products are the same without.
#pragma once

#include "model/layer_call.h"

namespace edgeh2o {

// Rows of a call: [n][n_heads * key_dim], [n][key_dim], [n][n_heads]. Without columns where a layer has no
// indexer of its own.
struct IndexRows {
  MatView<float> q, k, weights;
  IndexRows rows_from(size_t first, size_t n) const {
    return {q.rows_from(first, n), k.rows_from(first, n), weights.rows_from(first, n)};
  }
};

// Where they lie: behind the keys and values of a call of n rows.
IndexRows index_rows(const LayerCall& call, size_t n);

// Norm, rotation and scale of rows that hold products; the first is row first_row of the call's buffers.
void finish_index_rows(const LayerCall& call, size_t first_row, const IndexRows& rows);

// Norm and rotation of the rows of an indexer that scores blocks. Where blocks have keys (Qwen sparse
// attention, as Qwen3.8-Flash-Next has it) those are normed and rotated by choose_positions, and here the
// queries alone.
void finish_block_rows(const LayerCall& call, size_t first_row, const IndexRows& rows);

// What the rows from `first` of the step on read: by these rows of a layer that has an indexer, whose keys
// are in the cache, else as the nearest layer before it which has one has left it.
ChosenPositions choose_positions(const LayerCall& call, const IndexRows& rows, size_t first);

}  // namespace edgeh2o
