"""The HTTP apps that listen, put together from the protocols, and their answers for operators and probes."""
