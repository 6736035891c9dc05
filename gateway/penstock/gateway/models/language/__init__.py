"""Language models: the data plane, generations, adapters."""
