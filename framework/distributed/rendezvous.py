"""Rendezvous of the ranks: the store through which they connect, and torch's default process group.

Rank 0 serves the store unless the launcher provides one. It listens on MASTER_ADDR if that is an address of its host.
Each process group uses a separate key prefix, and so does each start of a run if its launcher distinguishes starts
(SLURM, Open MPI, phalanx): a leftover rank of an earlier start that finds the same port open cannot join.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import itertools
import os
import secrets
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from ..core.errors import ConfigurationError, RankError, did_you_mean
from ..system.environment import gloo_interface, own_records, take_store_descriptor, uses_agent_store
from ..system.failing_exit import before_failing_exit
from ..system.launcher_env import LOOPBACK, Placement
from ..system.processes import allow_open_files
from .listening import listen

_LAST_MOMENT_SECONDS = 0.01
_FIRST_LOOK_SECONDS = 0.002
_LONGEST_LOOK_SECONDS = 0.1
_LOOKS_PER_SECOND = 1000.0
_KNOCK_SECONDS = 5.0
# The default group, one for control, one for asynchronous saves, and two of a mesh; and other open files.
_GROUPS = 5
_OTHER_FILES = 1024
# One store serves all process groups of a process: its port cannot be bound twice.
_stores: dict[tuple[str, int], Any] = {}
_meetings: Iterator[int] = itertools.count()
_waits = False
_is_aside = False


def is_initialized() -> bool:
    """Whether torch's default group exists."""
    return dist.is_available() and dist.is_initialized()


@contextlib.contextmanager
def default_group_aside() -> Iterator[None]:
    """Context in which torch's default group does not exist for this process, for work that no other rank shares.

    Libraries that synchronize on their own, such as torchmetrics, would otherwise wait for the other ranks.
    """
    global _is_aside
    # Private, as torch has no way to leave a group for a while; its own elastic agents set it likewise.
    members: Any = dist.GroupMember if dist.is_available() else None
    group = members.WORLD if is_initialized() else None
    before, _is_aside = _is_aside, True
    if group is not None:
        members.WORLD = None
    try:
        yield
    finally:
        _is_aside = before
        if group is not None:
            members.WORLD = group


def meet(place: Placement, backend: str, timeout: timedelta | None) -> None:
    """Build torch's default group and register its destruction at exit, since torch warns about leftovers. Collective.

    Raises:
        ConfigurationError: GLOO_SOCKET_IFNAME names an interface that this host lacks, MASTER_ADDR is not a host, or
            this is a rank that works alone beside others.
    """
    if _is_aside:
        raise ConfigurationError(
            "This strategy needs a process group, which rank 0 cannot have alone while other ranks wait for it: use "
            "strategy='auto' with devices=1, or the devices of all ranks."
        )
    common: dict[str, Any] = {"rank": place.rank, "world_size": place.size}
    if timeout is not None:
        common["timeout"] = timeout
    if place.size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), **common)  # type: ignore[attr-defined]
    else:
        # gloo connects each rank to every other one, separately for each group.
        allow_open_files(_GROUPS * place.size + _OTHER_FILES)
        _check_interface()
        limit = timeout or dist.constants.default_pg_timeout
        store: Any
        if place.launcher == "torchrun" and uses_agent_store():
            store, *_ = next(rendezvous("env://", place.rank, place.size, timeout=limit))
        else:
            store = _store(place, limit)
        store = dist.PrefixStore(f"phalanx/{place.run}/{next(_meetings)}", store)  # type: ignore[attr-defined]
        with _waiting():
            word = _gather(store, place, limit.total_seconds())
        dist.init_process_group(backend, store=dist.PrefixStore(word, store), **common)  # type: ignore[attr-defined]
    atexit.unregister(_leave)
    atexit.register(_leave)
    before_failing_exit(_abandon)


def is_waiting() -> bool:
    """Whether this rank is still waiting for others to join: it holds no state that could be lost."""
    return _waits


@contextlib.contextmanager
def _waiting() -> Iterator[None]:
    global _waits
    _waits = True
    try:
        yield
    finally:
        _waits = False


def _gather(store: Any, place: Placement, seconds: float) -> str:
    """Wait until all ranks have joined; return the session id that they share, unique to this start.

    Rank 0 chooses the id. Another rank may first read the id of an earlier start. It therefore publishes a random
    number (a nonce) under the id that it read, and continues only once rank 0 has repeated that number. Unlike torch's
    own wait, this one can be interrupted by signals.

    Raises:
        RankError: some ranks have not joined in time; rank 0 names them.
    """
    own, until = secrets.token_hex(8), time.monotonic() + seconds
    waits = pauses(_FIRST_LOOK_SECONDS, _LONGEST_LOOK_SECONDS, place.size)
    look = partial(_all_came, store, own, place.size) if place.rank == 0 else partial(_came, store, own, place.rank, [])
    try:
        if place.rank == 0:
            store.set("word", own)
        while (word := look()) is None:
            if time.monotonic() > until:
                late = [str(rank) for rank in range(1, place.size) if not store.check([f"{own}/come/{rank}"])]
                who = f"ranks {', '.join(late[:16])}" if place.rank == 0 else "rank 0 and all others"
                raise RankError(f"{who} did not join the rendezvous within {seconds:g} s: see what they printed.")
            time.sleep(next(waits))
    except dist.DistError as error:
        raise RankError(
            f"the rendezvous store shut down before all ranks had joined ({error}): see what rank 0 printed."
        ) from error
    return word


def shared_store() -> Any:
    """Return the store of torch's default process group; no other group uses its keys.

    Raises:
        ValueError: the default group does not exist.
    """
    group = dist.group.WORLD
    if group is None:
        raise ValueError("This process is in no process group.")
    return group.get_group_store()


def rank_store(place: Placement) -> Any:
    """Return a store that all ranks share, with its own keys. The ranks need not have formed the default group."""
    store = shared_store() if is_initialized() else _store(place, dist.constants.default_pg_timeout)
    return dist.PrefixStore("phalanx/ranks", store)  # type: ignore[attr-defined]


def pauses(first: float, longest: float, ranks: int) -> Iterator[float]:
    """Yield the seconds between polls of the store: growing, and longer if more ranks poll the same store."""
    longest = max(longest, ranks / _LOOKS_PER_SECOND)
    while True:
        yield first
        first = min(longest, 1.5 * first)


def _all_came(store: Any, word: str, size: int) -> str | None:
    """Repeat the nonces of the other ranks once all have published theirs; return the session id, or None before."""
    arrivals = [f"{word}/come/{rank}" for rank in range(1, size)]
    if not store.check(arrivals):
        return None
    store.multi_set([f"{word}/go/{rank}" for rank in range(1, size)], store.multi_get(arrivals))
    return word


def _came(store: Any, own: str, rank: int, seen: list[str]) -> str | None:
    """Publish this rank's nonce under rank 0's session id; return the id once rank 0 acknowledges it."""
    if store.check(["word"]) and (word := store.get("word").decode()) not in seen[-1:]:
        seen.append(word)
        store.set(f"{word}/come/{rank}", own)
    repeated = f"{seen[-1]}/go/{rank}" if seen else ""
    return seen[-1] if seen and store.check([repeated]) and store.get(repeated).decode() == own else None


def _check_interface() -> None:
    """Refuse an interface that does not exist: gloo would fail on this host while the others wait for it."""
    given = gloo_interface()
    if given is None or not hasattr(socket, "if_nameindex"):
        return
    there = [name for _, name in socket.if_nameindex()]
    for name in given.split(","):
        if name not in there:
            raise ConfigurationError(
                f"GLOO_SOCKET_IFNAME={given!r} in the environment, and this host has no interface {name!r}."
                f"{did_you_mean(name, there)} It has {', '.join(there)}."
            )


def _store(place: Placement, limit: timedelta) -> Any:
    """Return this process's store, created on first use; rank 0 serves it."""
    host, port = place.master_addr or LOOPBACK, place.master_port or 0
    if (host, port) not in _stores:
        # torch would bind all interfaces, and a port that phalanx chose may have been taken since.
        listening = take_store_descriptor()
        if listening is None and place.rank == 0 and place.launcher != "phalanx":
            listening = listen(host, port, place.size, alone=place.local_size == place.size)
        if listening is not None:
            os.set_inheritable(listening, False)
        with _waiting():
            _stores[host, port] = connect(host, port, limit.total_seconds(), listening)
    return _stores[host, port]


def connect(host: str, port: int, seconds: float, listening: int | None = None) -> Any:
    """Return the store at an address, once another process serves it there; at most ``seconds`` are waited.

    ``listening``: the descriptor of the socket on which this process serves the store itself.

    Raises:
        torch.distributed.DistError: there is none.
    """
    serving: dict[str, Any] = {"is_master": False}
    if listening is None:
        _knock(host, port, seconds)
    else:
        serving = {"is_master": True, "master_listen_fd": listening}
    return dist.TCPStore(host, port, timeout=timedelta(seconds=seconds), wait_for_workers=False, **serving)  # type: ignore[attr-defined]


def _knock(host: str, port: int, seconds: float) -> None:
    """Wait until a process listens there, at most ``seconds``; torch reports the error after that."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=_KNOCK_SECONDS):
            return
        time.sleep(_LONGEST_LOOK_SECONDS)


def destroy_group(held: list[dist.ProcessGroup]) -> None:
    """Destroy the group in the list, if any, and remove it."""
    if held and is_initialized():
        dist.destroy_process_group(held[0])
    held.clear()


def _abandon() -> None:
    """Leave the default group without destroying it if it uses NCCL. The process must end by ``os._exit``.

    Destroying it waits for all collectives that were started, and the other ranks may never join them.
    """
    if is_initialized() and "nccl" in dist.get_backend_config():
        atexit.unregister(_leave)
        own_records().record_leaving(dist.get_rank())


def _leave() -> None:
    """Destroy the default group as this process exits."""
    if not is_initialized():
        return
    own_records().record_leaving(dist.get_rank())
    # gloo's threads release the tensors of a collective under the interpreter's lock, a moment after it is done. A
    # thread that still waits for the lock when the interpreter shuts down aborts the process. So groups are destroyed
    # here, those in reference cycles included, and groups that are still referenced elsewhere get that moment.
    gc.collect()
    dist.destroy_process_group()
    time.sleep(_LAST_MOMENT_SECONDS)
