"""ONNX decoders: onnxruntime runs the dense parts, the core the attention between them."""
