"""Bytes on connections: HTTP/1.1, HTTP/2 and gRPC, on one base."""
