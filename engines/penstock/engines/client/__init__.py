"""The gateway's side of an engine: the seam, its streams, and calls that wait for a reply."""
