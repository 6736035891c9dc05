"""The machine that processes run on: cores, memory, GPUs, placement, terminals, caches, and records of crashes."""
