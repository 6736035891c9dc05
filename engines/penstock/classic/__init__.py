"""The classic side: models that answer whole tensors, batched dynamically, read from Triton model repositories."""
