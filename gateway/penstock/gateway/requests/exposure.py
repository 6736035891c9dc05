"""Checks of who may reach a server without a key: from which addresses, under which names, and through which web
pages."""

from __future__ import annotations

import re
from typing import get_args

from penstock.gateway.configuration.config import Config, ConfigError
from penstock.gateway.configuration.sections.server import ServerConfig
from penstock.gateway.configuration.sections.types import ListeningPort
from penstock.gateway.requests.addresses import ip_literal, is_loopback
from penstock.gateway.requests.browser_rules import ANY_ORIGIN, BrowserRules

_NAME = re.compile(r"[a-z0-9]([a-z0-9._-]*[a-z0-9])?")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@,]+")


def check_exposure(config: Config) -> None:
    """Raises ConfigError when a port would serve other machines without asking for a key, and nobody has said that it
    may; and for names and origins that no browser would send."""
    server = config.server
    browser_rules(server, "http")
    shows_console(server)
    if server.has_keys or server.allow_anonymous:
        return
    ask_for_certificates = {"http": config.http.http_use_ssl_mutual, "grpc": config.grpc.grpc_use_ssl_mutual}
    for port in get_args(ListeningPort):
        address = server.address(port)
        guarded = is_loopback(address) or ask_for_certificates.get(port, False)
        if getattr(server, f"allow_{port}") and not guarded:
            raise ConfigError(
                f"{_TITLES[port]} on {address or 'all addresses'}: other machines could use it without a key; set "
                "--api-key, or allow it with --allow-anonymous"
            )


_TITLES: dict[ListeningPort, str] = {"http": "HTTP", "grpc": "gRPC", "metrics": "metrics"}


def asks_for_keys(server: ServerConfig, port: ListeningPort) -> bool:
    """Metrics are open on loopback, for scrapers beside the server; elsewhere only if that is allowed."""
    if port == "metrics" and (server.allow_anonymous or is_loopback(server.address(port))):
        return False
    return server.has_keys


def shows_console(server: ServerConfig) -> bool:
    """Without being told to only where no key is asked for and no other machine can reach it. Raises ConfigError where
    others could look at it without a key."""
    open_to_this_machine = not server.has_keys and is_loopback(server.address("http"))
    if server.console and not server.has_keys and not open_to_this_machine:
        raise ConfigError("console: other machines could look at this server without a key; set --admin-key")
    return open_to_this_machine if server.console is None else server.console


def browser_rules(server: ServerConfig, port: ListeningPort) -> BrowserRules:
    """Raises ConfigError."""
    address = server.address(port)
    origins = {_origin(text) for text in server.allowed_origins}
    if ANY_ORIGIN in origins and not server.has_keys:
        raise ConfigError("allowed-origins: '*' without --api-key would let every web page use this server")
    if not asks_for_keys(server, port):
        origins.discard(ANY_ORIGIN)
    return BrowserRules(
        hosts=frozenset(map(_host, server.allowed_hosts)) | {address.lower()},
        any_address=not is_loopback(address),
        origins=frozenset(origins),
    )


def _host(text: str) -> str:
    host = text.strip().lower().strip("[]").removesuffix(".")
    address = ip_literal(host)
    if address is None and not _NAME.fullmatch(host):
        raise ConfigError(f"allowed-hosts: {text!r} is not a host's name or address; leave out scheme, port and path")
    return host if address is None else str(address)


def _origin(text: str) -> str:
    origin = text.strip().lower().removesuffix("/")
    if origin != ANY_ORIGIN and not _ORIGIN.fullmatch(origin):
        raise ConfigError(
            f"allowed-origins: {text!r} is not an origin, as in https://app.example.org or http://localhost:3000"
        )
    return origin
