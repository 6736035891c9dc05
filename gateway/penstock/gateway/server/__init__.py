"""A server's life: its parts, its ports, its start and its end."""
