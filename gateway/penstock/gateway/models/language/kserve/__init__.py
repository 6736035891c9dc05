"""Language models as KServe models: their tensors, and their folders in a model repository."""
