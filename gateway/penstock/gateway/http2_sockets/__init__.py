"""Connections of HTTP/2 on sockets: what the HTTP port and the gRPC port share."""
