"""What tiny models of some families have beside the keys and tensors of a llama."""
