"""`penstock top`: a running server in a terminal."""

from penstock.gateway.commands.top.command import add_top_command

__all__ = ["add_top_command"]
