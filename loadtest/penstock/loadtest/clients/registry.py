"""Which client speaks which protocol."""

from __future__ import annotations

from functools import partial

from penstock.loadtest.clients.base import Client
from penstock.loadtest.clients.openai import CompletionsClient
from penstock.loadtest.clients.settings import client_options
from penstock.loadtest.options import Target

CLIENTS = {
    "openai-chat": partial(CompletionsClient, chat=True),
    "openai-completions": partial(CompletionsClient, chat=False),
}


def make_client(target: Target, *, keep_text: bool = False, seed: int = 0) -> Client:
    """Raises LoadTestError for an option that cannot be."""
    return CLIENTS[target.protocol](client_options(target, keep_text=keep_text, seed=seed))
