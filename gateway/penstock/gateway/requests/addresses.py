"""Addresses as they are written."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address


def url_host(host: str) -> str:
    """As it stands before a port: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host


def ip_literal(text: str) -> IPv4Address | IPv6Address | None:
    """The address, if the text is one and not a name; an IPv4 address in IPv6 form is the IPv4 address."""
    try:
        address = ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens there. Names other than localhost may lead anywhere."""
    address = ip_literal(host)
    return host.lower() == "localhost" if address is None else address.is_loopback
