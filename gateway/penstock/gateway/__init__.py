"""Protocols in, streams out: HTTP, gRPC, admission, metrics, command line."""
