#pragma once

#include <string>

#include "model/decoder_config.h"
#include "model/slot_list.h"
#include "model/weights.h"

namespace edgeh2o {

// Lists the tensors of a layer's mixer, whose names begin with `prefix`; norms that all kinds have are none
// of them.
void list_mixer(const SlotList& list, const std::string& prefix, const DecoderConfig& config,
                const LayerSpec& spec, LayerWeights& layer);

}  // namespace edgeh2o
