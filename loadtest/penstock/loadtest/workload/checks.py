"""Settings that contradict each other. One that would have no effect is refused, too."""

from __future__ import annotations

from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.options import LoadOptions, Options, WorkloadOptions
from penstock.loadtest.workload.contents import CHATS, TENSORS
from penstock.loadtest.workload.mixes import SETTINGS, SYNTHETIC, Share

_DEFAULTS = WorkloadOptions()
_LOAD_DEFAULTS = LoadOptions()


def check(options: Options, parts: list[Share]) -> None:
    """Raises LoadTestError."""
    workload, load, protocol = options.workload, options.load, options.target.protocol
    if workload.trace is None:
        _none_of(workload, ("trace_speed", "trace_format", "trace_block"), "needs --trace")
    else:
        _none_of(workload, (*SETTINGS, "mix"), "a trace has its own requests")
        if load.rate is not None or load.ramp:
            raise LoadTestError("rate and ramp: a trace has its own times; --trace-speed changes them")
    if load.rate is None and load.arrival != _LOAD_DEFAULTS.arrival:
        raise LoadTestError("arrival: needs --rate; a closed loop sends when there is a free place")
    if options.open_loop:
        if load.concurrency != _LOAD_DEFAULTS.concurrency:
            raise LoadTestError(
                "concurrency: an open loop (--rate, --trace) sends at given times; --max-in-flight bounds it"
            )
    elif load.max_in_flight != _LOAD_DEFAULTS.max_in_flight:
        raise LoadTestError("max-in-flight: needs --rate or --trace; a closed loop has --concurrency")
    if load.burstiness != _LOAD_DEFAULTS.burstiness and load.arrival != "gamma":
        raise LoadTestError("burstiness: needs --arrival gamma")
    if protocol in TENSORS:
        for part in parts:
            _none_of(part.options, (*SETTINGS, "tokenizer"), f"{protocol} has tensors, not prompts")
    for part in parts:
        _check_part(part.options, protocol, workload.token_ids)


def _check_part(part: WorkloadOptions, protocol: str, token_ids: bool) -> None:
    if part.dataset is not None:
        _none_of(part, SYNTHETIC, "a dataset has its own prompts")
        if token_ids:
            raise LoadTestError("token-ids: a dataset has its own prompts")
    if part.prefixes > 1 and not part.shared_prefix_tokens:
        raise LoadTestError("prefixes: needs --shared-prefix-tokens")
    if part.turn_delay and part.turns == 1:
        raise LoadTestError("turn-delay: needs --turns of 2 or more")
    if part.turns > 1 and protocol not in CHATS:
        raise LoadTestError(f"turns: a session needs a protocol for chats, not {protocol}")


def _none_of(workload: WorkloadOptions, names: tuple[str, ...], reason: str) -> None:
    for name in names:
        if getattr(workload, name) != getattr(_DEFAULTS, name):
            raise LoadTestError(f"{name.replace('_', '-')}: {reason}")
