"""Connections on sockets, and of HTTP/2 on them: what the HTTP port and the gRPC port share."""
