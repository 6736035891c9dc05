"""Addresses as they are written."""

from __future__ import annotations


def url_host(host: str) -> str:
    """As it stands before a port: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host
