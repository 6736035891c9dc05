"""`penstock bench`: what a model and an engine do in this process, without a server."""

from .command import add_bench_command

__all__ = ["add_bench_command"]
