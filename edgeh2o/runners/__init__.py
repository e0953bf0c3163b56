"""What turns tokens into logits: one small protocol, one module per kind of model file."""
