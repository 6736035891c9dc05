"""Settings of the HTTP app, made by the composition root."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from penstock.gateway.requests.access import ApiKeys, Restrictions
from penstock.gateway.requests.browser_rules import BrowserRules
from penstock.gateway.requests.call import DrainState, RequestJournal
from penstock.gateway.requests.intake import BodyIntake, WorkPools
from penstock.gateway.requests.load_report import LoadReporter
from penstock.gateway.requests.server_health import ServerHealth


async def _no_metrics() -> tuple[bytes, str]:
    return b"", "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True, kw_only=True)
class AppSettings:
    version: str = "0"
    policy: str = "fcfs"
    """The scheduler's; requests may carry a nonzero priority only under `priority`."""
    keys: ApiKeys = field(default_factory=ApiKeys)
    """Who is let in. Without a key: all that `browsers` lets in, where `keys` asks for none."""
    restrictions: Restrictions = field(default_factory=dict)
    browsers: BrowserRules = field(default_factory=BrowserRules)
    metrics: Callable[[], Awaitable[tuple[bytes, str]]] = _no_metrics
    """Gives the metrics text and its content type."""
    health: ServerHealth | None = None
    """None: that of the language models."""
    drain: DrainState = field(default_factory=DrainState)
    intake: BodyIntake = field(default_factory=BodyIntake)
    pools: WorkPools = field(default_factory=WorkPools)
    journal: RequestJournal = field(default_factory=RequestJournal)
    load: LoadReporter | None = None
    """None: balancers are told nothing of the server's load."""
    heartbeat_s: float = 15.0
    """Seconds of silence after which a token stream gets a comment; 0: never."""
    resumable_streams: float = 0.0
    """Seconds for which a stream of chats or text completions goes on without its client; 0: it ends with it."""
    max_body_bytes: int = 8 << 20
    max_choices: int = 1024
    """Bound on prompts x n of one call."""
    stored_responses: int = 1000
    """Most responses of the Responses API that are kept; 0: none."""
    stored_responses_memory: int = 64 << 20
    """Bytes of all of them together."""
    stored_responses_per_tenant: int | None = None
    stored_responses_memory_per_tenant: int | None = None
    """None: as much as all together."""
    background_responses: int = 100
    """Most responses that are being made in the background; 0: none."""
    background_responses_per_tenant: int | None = None
    default_model: str | None = None
    """Of requests that name none; None: the only one that they can use."""
    system_fingerprint: str = "penstock"
