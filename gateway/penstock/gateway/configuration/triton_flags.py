"""Triton's flags: those that mean the same here, those that are written another way, those that only tune Triton's own
machinery, and those that have no counterpart, with the reason."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence

from penstock.gateway.configuration.command_parser import CommandParser
from penstock.gateway.configuration.flag_hints import FLAG_HINTS

_GPU_MEMORY = "backends manage their own memory"
_HOST = "processes are placed by taskset or the container"
_PORT = "a port belongs to one server"
_SAGEMAKER = "there is no SageMaker endpoint"
_VERTEX = "there is no Vertex AI endpoint"

TRITON_REFUSED: dict[str, str] = {
    "--reuse-http-port": _PORT,
    "--reuse-grpc-port": _PORT,
    "--min-supported-compute-capability": _GPU_MEMORY,
    "--model-load-gpu-limit": f"{_GPU_MEMORY}; --memory-limit bounds what language models take",
    "--host-policy": _HOST,
    "--repoagent-directory": "there are no repository agents",
    "--model-namespacing": "model names are unique over all repositories",
    "--allow-sagemaker": _SAGEMAKER,
    "--sagemaker-port": _SAGEMAKER,
    "--sagemaker-port-range": _SAGEMAKER,
    "--sagemaker-safe-port-range": _SAGEMAKER,
    "--sagemaker-thread-count": _SAGEMAKER,
    "--allow-vertex-ai": _VERTEX,
    "--vertex-ai-port": _VERTEX,
    "--vertex-ai-thread-count": _VERTEX,
    "--vertex-ai-default-model": _VERTEX,
}
"""They bound, place or open something. The errors tell what to change in a start script."""
_OFF_BY_DEFAULT = frozenset(
    ("--reuse-http-port", "--reuse-grpc-port", "--model-namespacing", "--allow-sagemaker", "--allow-vertex-ai")
)
"""Refused, but for the value that says what is so here."""

_LOOP = "one event loop serves the port"
_POOL = "responses are not kept in a pool, and streams bound what is unread"
TRITON_TUNING: dict[str, str] = {
    "--http-thread-count": f"{_LOOP}; --fronts has more processes",
    "--grpc-infer-thread-count": f"{_LOOP}; --fronts has more processes",
    "--grpc-infer-allocation-pool-size": _POOL,
    "--grpc-max-response-pool-size": _POOL,
    "--metrics-interval-ms": "metrics are read when they are scraped",
    "--cache-directory": "the response caches are part of the server; --cache-config chooses one",
    "--pinned-memory-pool-byte-size": _GPU_MEMORY,
    "--cuda-memory-pool-byte-size": _GPU_MEMORY,
    "--cuda-virtual-address-size": _GPU_MEMORY,
    "--enable-peer-access": _GPU_MEMORY,
    "--buffer-manager-thread-count": _GPU_MEMORY,
}
"""They tune what is not there: a warning, and the server starts. No flag about access, TLS or limits is among them."""
TRITON_OLD: dict[str, tuple[str, str]] = {
    "--strict-model-config": ("--disable-auto-complete-config", ""),
    "--trace-file": ("--trace-config", "triton,file="),
    "--trace-level": ("--trace-config", "level="),
    "--trace-rate": ("--trace-config", "rate="),
    "--trace-count": ("--trace-config", "count="),
    "--trace-log-frequency": ("--trace-config", "triton,log-frequency="),
}
"""Older names of Triton's own: today's flag, and what its value begins with. They are obeyed, with a warning."""
TRITON_SERVED = frozenset(
    "--" + name
    for name in (
        *("model-repository", "model-store", "exit-on-error", "disable-auto-complete-config", "strict-readiness"),
        *("model-control-mode", "repository-poll-secs", "load-model", "model-config-name", "model-load-thread-count"),
        *("model-load-retry-count", "id", "exit-timeout-secs", "allow-http", "http-address", "http-port"),
        *("http-header-forward-pattern", "http-max-input-size", "http-restricted-api", "allow-grpc", "grpc-address"),
        *("grpc-port", "grpc-header-forward-pattern", "grpc-restricted-protocol", "grpc-use-ssl"),
        *("grpc-use-ssl-mutual", "grpc-server-cert", "grpc-server-key", "grpc-root-cert"),
        *("grpc-infer-response-compression-level", "grpc-keepalive-time", "grpc-keepalive-timeout"),
        *("grpc-keepalive-permit-without-calls", "grpc-http2-max-pings-without-data"),
        *("grpc-http2-min-recv-ping-interval-without-data", "grpc-http2-max-ping-strikes"),
        *("grpc-max-connection-age", "grpc-max-connection-age-grace", "allow-metrics", "metrics-address"),
        *("metrics-port", "metrics-config", "allow-gpu-metrics", "allow-cpu-metrics"),
        *("log-verbose", "log-info", "log-warning", "log-error", "log-format", "log-file"),
        *("trace-config", "cache-config", "response-cache-byte-size", "rate-limit", "rate-limit-resource"),
        *("allow-client-shm", "backend-directory", "backend-config"),
    )
)
"""Flags of ours that are Triton's."""

_OTHERS = TRITON_REFUSED.keys() | TRITON_TUNING.keys() | TRITON_OLD.keys()
_STATES = {"true": True, "1": True, "on": True, "false": False, "0": False, "off": False}
_MOST_LISTED = 6


def without_triton_forms(switches: Collection[str], parser: CommandParser, argv: Sequence[str]) -> list[str]:
    """The arguments as argparse takes them: Triton writes switches as --name=true and --name=false, may abbreviate
    names, and has flags that mean nothing here. `switches`: names of settings that are on or off."""
    end = argv.index("--") if "--" in argv else len(argv)
    rest = iter(argv[:end])
    plain: list[str] = []
    warnings: dict[str, None] = {}
    for arg in rest:
        flag, equals, value = arg.partition("=")
        if flag.startswith("--") and flag not in parser.flags and flag not in FLAG_HINTS:
            flag = _in_full(parser, flag)
        if flag not in _OTHERS:
            plain.append(_switch(flag, value, switches) if equals else flag)
            continue
        ours, more = _ours(parser, flag, value if equals else next(rest, ""))
        plain += [_switch(*setting, switches) for setting in ours]
        warnings |= dict.fromkeys(more)
    for warning in warnings:
        print(f"{parser.prog}: warning: {warning}", file=sys.stderr)
    return [*plain, *argv[end:]]


def _in_full(parser: CommandParser, flag: str) -> str:
    """A flag of Triton's that may be abbreviated, where no other flag begins so; any other flag as it is. Triton reads
    its command line by getopt_long, so start scripts have --model-repo. An abbreviation means what the whole name
    means; where there are several, the command fails and names them."""
    longer = sorted({candidate for candidate in (*parser.flags, *_OTHERS) if candidate.startswith(flag)})
    if flag in longer:
        return flag
    if len(longer) > 1 and any(candidate in TRITON_SERVED or candidate in _OTHERS for candidate in longer):
        more = ", ..." if len(longer) > _MOST_LISTED else ""
        parser.fail(f"there is no flag {flag}", f"write it in full: {' or '.join(longer[:_MOST_LISTED])}{more}")
    one = longer[0] if longer else flag
    return one if one in TRITON_SERVED or one in _OTHERS else flag


def _ours(parser: CommandParser, flag: str, value: str) -> tuple[list[tuple[str, str]], list[str]]:
    """What stands here in place of a flag that only Triton has, if anything, and what to warn of."""
    if not value or value.startswith("--"):  # another flag, which must not be passed over
        parser.fail(f"{flag}: expected one argument")
    if flag in TRITON_TUNING:
        return [], [f"{flag} has no effect: {TRITON_TUNING[flag]}"]
    if flag in TRITON_OLD:
        name, begin = TRITON_OLD[flag]
        return [(name, begin + value)], [f"{flag} is an older name of Triton's own: use {name}={begin}{value}"]
    if flag not in _OFF_BY_DEFAULT or _STATES.get(value.lower()) is not False:
        parser.fail(f"{flag} is a flag of Triton's that this server does not have: {TRITON_REFUSED[flag]}")
    return [], []


def _switch(flag: str, value: str, switches: Collection[str]) -> str:
    state = _STATES.get(value.lower())
    if state is None or flag.removeprefix("--").replace("-", "_") not in switches:
        return f"{flag}={value}"
    return flag if state else "--no-" + flag.removeprefix("--")
