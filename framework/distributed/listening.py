"""``listen``: the socket on which the store of a rendezvous is served."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import time

from ..core.errors import ConfigurationError

# A scheduler may publish the names of its hosts a moment after it has started them.
_RESOLVE_SECONDS = 10.0
_RETRY_SECONDS = 0.25


def wait_for_host(host: str, option: str) -> None:
    """Wait a moment for a host to be known; ``option`` is the one with which it was given.

    Raises:
        ConfigurationError: it is unknown.
    """
    until = time.monotonic() + _RESOLVE_SECONDS
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except OSError as error:
            if time.monotonic() > until:
                raise ConfigurationError(f"{option} {host!r} is not a host that is known here: {error}.") from None
        time.sleep(_RETRY_SECONDS)


def listen(host: str, port: int, size: int, alone: bool, option: str = "") -> int:
    """Return a socket that listens on the address that other ranks connect to, and on no other if possible.

    ``alone``: all ranks are on this host. Otherwise it listens on all interfaces if the address is a loopback address
    (some systems resolve their own name to one), or is forwarded to this host. ``option``: the command's option for
    both, which are else the variables MASTER_ADDR and MASTER_PORT.

    Raises:
        ConfigurationError: the host is unknown, or the port is in use.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigurationError(
            f"{option or 'MASTER_ADDR'}={host!r} is not a host that rank 0 can resolve ({error}): set it to the "
            "address of rank 0's host."
        ) from None
    found = dict.fromkeys((family, str(place[0])) for family, *_, place in addresses)
    reachable = [(family, address) for family, address in found if alone or not _is_loopback(address)]
    # Of several addresses, other hosts may connect to any; ranks on this host try all in this order.
    for family, address in reachable if alone or len(reachable) == 1 else []:
        with contextlib.suppress(OSError):
            return socket.create_server((address, port), family=family, backlog=max(64, 2 * size)).detach()
    try:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        return socket.create_server(("", port), family=family, backlog=max(64, 2 * size), dualstack_ipv6=dual).detach()
    except OSError as error:
        raise ConfigurationError(
            f"{option or 'MASTER_PORT'}={port} cannot be listened on by rank 0 ({error.strerror}): choose another "
            "port, the same for all ranks."
        ) from None


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
