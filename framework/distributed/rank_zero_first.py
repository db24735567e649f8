"""One rank before the others: they wait on the store, where it leaves word of how it went.

A collective would not do: it gives up after its own limit, half an hour, while a download may take hours; and ranks
that wait in one do not learn that the first has failed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..core.errors import ConfigurationError, RankError
from ..system.processes import is_running
from .rendezvous import pauses, shared_store
from .world import World

WAIT_SECONDS = 86400.0
"""How long the others wait where nobody says."""
_FIRST_LOOK_SECONDS = 0.005
_LONGEST_LOOK_SECONDS = 0.5
_GRACE_SECONDS = 0.3
_DONE = b"done"


@contextlib.contextmanager
def first_in_turn(world: World, local: bool = False, seconds: float | None = None) -> Iterator[None]:
    """Let rank 0 (with ``local`` the first rank of each node) through the block, and then the others. Collective.

    With ``local`` everybody waits for the first ranks of all nodes, these among one another after the block.

    Args:
        world: the ranks.
        local: whether each node has a first rank of its own.
        seconds: how long others are waited for at most; a day where that is None.

    Raises:
        ConfigurationError: ``seconds`` is no positive number.
        RankError: another first rank raised, with what it said, or was killed, or took too long.
    """
    limit = WAIT_SECONDS if seconds is None else seconds
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit > 0:
        raise ConfigurationError(f"timeout={seconds!r}: how many seconds the others wait must be a positive number.")
    if world.size == 1:
        yield
        return
    leads = (world.local_rank if local else world.rank) == 0
    machine = _machine()
    told = world.all_gather_object((leads, secrets.token_hex(8), machine, os.getpid()))
    keys = {rank: f"phalanx/turn/{told[0][1]}/{rank}" for rank, (first, *_) in enumerate(told) if first}
    near = {rank: told[rank][3] for rank in keys if told[rank][2] == machine is not None}
    store = shared_store()
    if not leads:
        _wait(store, keys, near, limit)
        yield
        return
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(dist.DistError):
            word = f"rank {world.rank}: {type(error).__name__}: {error}"
            store.set(keys[world.rank], word.encode(errors="replace"))
        raise
    store.set(keys[world.rank], _DONE)
    _wait(store, keys, near, limit)


def _wait(store: Any, keys: Mapping[int, str], near: Mapping[int, int], limit: float) -> None:
    """Wait for the first ranks' word; ``near`` are those whose processes can be seen from here."""
    until = time.monotonic() + limit
    waits = pauses(_FIRST_LOOK_SECONDS, _LONGEST_LOOK_SECONDS, dist.get_world_size())
    waiting = dict(keys)
    try:
        while True:
            for rank, key in [*waiting.items()]:
                # Whoever starts ranks on several hosts may leave the others be when one is killed.
                if rank in near and not is_running(near[rank]):
                    # For those on other hosts too, unless it was done before.
                    store.compare_set(key, "", f"rank {rank}: its process has ended")
                elif not store.check([key]):
                    continue
                del waiting[rank]
                word = bytes(store.get(key))
                if word != _DONE:
                    # Who failed is to be seen to fail first: this is only what comes of it.
                    time.sleep(_GRACE_SECONDS)
                    raise RankError(f"what this rank waited for failed on {word.decode()}")
            if not waiting:
                return
            if time.monotonic() > until:
                raise RankError(f"what this rank waited for was not done within {limit:g} s: pass a longer timeout.")
            time.sleep(next(waits))
    except dist.DistError as error:
        raise RankError(f"the store was lost while another rank was waited for: {error}") from error


def _machine() -> str | None:
    """Return what processes have in common that see one another by their numbers; None where that is not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None
