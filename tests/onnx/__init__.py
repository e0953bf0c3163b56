"""Tests of ONNX models: tiny ones that the project writes, onnxruntime itself as the oracle."""
