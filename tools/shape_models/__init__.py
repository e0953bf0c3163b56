"""The parts of ``tools.make_shape_model``: shapes, tensors, random weights."""
