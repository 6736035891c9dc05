"""The gRPC port: inference.GRPCInferenceService as Triton serves it, health, and reflection."""
