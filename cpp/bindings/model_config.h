// What a decoder computes, read from fields of Python.
#pragma once

#include <pybind11/pybind11.h>

#include "model/decoder_config.h"

namespace edgeh2o {

// Throws what Python sees as a TypeError for an unknown field, and as a ValueError for one that no model has.
DecoderConfig make_config(const pybind11::kwargs& fields);

}  // namespace edgeh2o
