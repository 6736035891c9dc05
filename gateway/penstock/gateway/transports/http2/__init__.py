"""HTTP/2, the server's side of a connection: bytes in, events out; calls that queue frames, bytes out. No sockets."""
