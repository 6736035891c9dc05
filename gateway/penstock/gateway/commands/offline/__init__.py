"""Models in a Python program: the engines and the data plane of a server, without its ports."""
