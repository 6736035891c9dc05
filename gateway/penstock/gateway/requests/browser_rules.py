"""Rules for browsers that use a port: names of the server, and origins of web pages."""

from __future__ import annotations

from dataclasses import dataclass

ANY_ORIGIN = "*"


@dataclass(frozen=True, slots=True, kw_only=True)
class BrowserRules:
    """What browsers may bring to a port. All in lower case."""

    hosts: frozenset[str] = frozenset()
    """Names and addresses that count as this server's, besides loopback's, where no key is needed."""
    any_address: bool = False
    """Every IP address counts as well: for ports that other machines reach."""
    origins: frozenset[str] = frozenset()
    """Whose web pages may use the port, as `scheme://host[:port]`, or ANY_ORIGIN."""
