"""Micro benchmarks of the book-keeping between two model steps: `python -m penstock.loadtest.micro`."""
