"""What the kernel still has for a client."""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress


def untaken_bytes(transport: asyncio.BaseTransport) -> int:
    """Bytes that the client's machine has not acknowledged, and 1 for the end of the connection; 0 where the system
    does not tell. Of a transport that is not closing."""
    if sys.platform != "linux":
        return 0
    import fcntl  # not everywhere
    import termios

    found = bytes(4)
    with suppress(OSError):
        found = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, found)
    return int.from_bytes(found, sys.byteorder)
