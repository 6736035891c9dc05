"""The flags of `penstock chat`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any

from .api import ChatApi, ChatError
from .program import Conversation, Screen, answer_once, talk

_URL = "http://127.0.0.1:8000"


def add_chat_command(commands: Any, formatter: Callable[..., argparse.HelpFormatter]) -> None:
    """`commands` are argparse's subparsers."""
    chat = commands.add_parser(
        "chat",
        help="talk to a model in the terminal",
        description="Talks to a model of any server with an OpenAI API. With a pipe as standard input it answers that "
        "one prompt, and prints nothing but the answer.",
        formatter_class=formatter,
    )
    chat.add_argument("--url", default=_URL, metavar="URL", help=f"the server's address (default: {_URL})")
    chat.add_argument("--model", metavar="NAME", help="which model (default: the server's first)")
    chat.add_argument("--system", metavar="TEXT", help="tells the model how to answer")
    chat.add_argument("--api-key", metavar="KEY", help="default: the variable OPENAI_API_KEY")
    chat.add_argument("--temperature", type=float, metavar="T", help="0: always the likeliest (default: the model's)")
    chat.add_argument("--max-tokens", type=int, metavar="N", help="of an answer (default: what the context leaves)")
    chat.set_defaults(run_command=_run)


def _run(args: dict[str, Any]) -> int:
    """The exit status: 1 where there is no answer, 130 for Ctrl-C before there is one."""
    screen = Screen(sys.stdout, colored=sys.stdout.isatty())
    try:
        api = ChatApi(args["url"], args["api_key"] or os.environ.get("OPENAI_API_KEY"))
        conversation = Conversation(
            api,
            args["model"] or api.first_model(),
            args["system"],
            temperature=args["temperature"],
            max_tokens=args["max_tokens"],
        )
        if sys.stdin.isatty():
            talk(conversation, screen)
        else:
            answer_once(conversation, sys.stdin.read(), screen)
    except ChatError as error:
        screen.end()
        print(f"penstock chat: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        screen.end()
        return 130
    return 0
