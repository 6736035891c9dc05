"""File descriptors: how many connections the process can have."""

from __future__ import annotations

_RESERVED = 128
"""For everything else: engines, models' processes, files, gRPC."""
_LEAST = 16


def connections_within_limit(wanted: int) -> int:
    """`wanted`, or fewer where the process may not have that many descriptors. Raises the soft limit to the hard one
    first."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _RESERVED
    if resource.RLIM_INFINITY != soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return max(_LEAST, min(wanted, soft - _RESERVED))
    return wanted
