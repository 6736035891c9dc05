"""KServe v2 with Triton's extensions, over HTTP and gRPC."""
