"""Ports for tests that start servers at an address that is given in advance."""

from __future__ import annotations

import contextlib
import random
import socket

FIRST = 20_000
# Below the ports that Linux gives to connections: one of those may be taken between this look and a server's start.
_PAST_LAST = 30_000
# Tests seed the generator of the module ``random`` alike, and several of them run at a time.
_generator = random.SystemRandom()


def free_port() -> int:
    """Return a port from `FIRST` to 29,999 that nothing on this machine listens on."""
    while True:
        port = _generator.randrange(FIRST, _PAST_LAST)
        with contextlib.suppress(OSError):
            socket.create_server(("", port)).close()
            return port
