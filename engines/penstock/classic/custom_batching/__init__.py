"""Custom batching: a class beside the model decides which requests share a batch."""
