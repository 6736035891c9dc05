"""gRPC over HTTP/2 on the event loop: messages, metadata, statuses, deadlines, and the port that serves them."""
