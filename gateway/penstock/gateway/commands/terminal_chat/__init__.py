"""`penstock chat`: talks to a server of the OpenAI API in the terminal."""

from .command import add_chat_command

__all__ = ["add_chat_command"]
