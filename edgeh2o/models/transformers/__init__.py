"""Models as Hugging Face publishes them: their settings and tensors in the words of GGUF."""
