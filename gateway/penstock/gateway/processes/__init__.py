"""The processes that share a server's work: fronts, and the host of classic models."""
