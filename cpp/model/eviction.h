// Room in a full context of a decoder.
#pragma once

#include "model/decoder_config.h"
#include "sequence/sequence.h"

namespace edgeh2o {

// Lets the sequence evict, or no more. Throws std::invalid_argument for a model whose keys cannot be moved,
// and as Sequence::allow_eviction does.
void allow_eviction(const DecoderConfig& config, Sequence& sequence, bool is_allowed);

// Throws what allow_eviction would for a sequence of that policy and shape, which need not be there.
void check_eviction(const DecoderConfig& config, const SparsePolicy& policy, const SequenceShape& shape);

// Drops n_dropped tokens of every KV head, each its own, and gives the others the positions from 0 on: keys
// are rotated to them.
void evict(const DecoderConfig& config, Sequence& sequence, size_t n_dropped);

}  // namespace edgeh2o
