"""`penstock verify`: a report that says whether a checkpoint works here."""

from .command import add_verify_command

__all__ = ["add_verify_command"]
