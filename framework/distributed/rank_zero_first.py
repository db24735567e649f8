"""Run a block on rank 0 first; the other ranks wait on the store for its success or error.

A collective cannot be used: its timeout is half an hour while a download may take hours, and ranks that wait in a
collective are not notified when the first rank fails.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist

from ..core.errors import ConfigurationError, RankError
from ..system.processes import is_running, process_space
from .rendezvous import pauses, shared_store
from .world import World

WAIT_SECONDS = 86400.0
"""The default time that the other ranks wait, in seconds."""
_FIRST_LOOK_SECONDS = 0.005
_LONGEST_LOOK_SECONDS = 0.5
_GRACE_SECONDS = 0.3
_DONE = b"done"


@contextlib.contextmanager
def first_in_turn(world: World, local: bool = False, seconds: float | None = None) -> Iterator[None]:
    """Run the block on rank 0 first (with ``local``, on the first rank of each node), then on the others. Collective.

    With ``local``, all ranks wait for the first ranks of all nodes; the first ranks wait for each other after the
    block.

    Args:
        local: whether the first rank of each node runs the block first.
        seconds: the longest time to wait for other ranks; None means one day.

    Raises:
        ConfigurationError: ``seconds`` is not a positive number.
        RankError: a first rank raised (the message is included), was killed, or took too long.
    """
    limit = WAIT_SECONDS if seconds is None else seconds
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit > 0:
        raise ConfigurationError(f"timeout={seconds!r}: how many seconds the others wait must be a positive number.")
    if world.size == 1:
        yield
        return
    leads = (world.local_rank if local else world.rank) == 0
    machine = process_space()
    ranks = world.all_gather_object((leads, secrets.token_hex(8), machine, os.getpid()))
    keys = {rank: f"phalanx/turn/{ranks[0][1]}/{rank}" for rank, (first, *_) in enumerate(ranks) if first}
    near = {rank: ranks[rank][3] for rank in keys if ranks[rank][2] == machine is not None}
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
    """Wait for the results of the first ranks; ``near`` maps ranks whose processes are visible on this host to their
    pids."""
    until = time.monotonic() + limit
    waits = pauses(_FIRST_LOOK_SECONDS, _LONGEST_LOOK_SECONDS, dist.get_world_size())
    waiting = dict(keys)
    try:
        while True:
            for rank, key in [*waiting.items()]:
                # Launchers on several hosts may leave the other ranks running when one is killed.
                if rank in near and not is_running(near[rank]):
                    # Also for ranks on other hosts, unless the key is set already.
                    store.compare_set(key, "", f"rank {rank}: its process has ended")
                elif not store.check([key]):
                    continue
                del waiting[rank]
                word = bytes(store.get(key))
                if word != _DONE:
                    # Give the rank that failed time to report its error first: this one is only a consequence.
                    time.sleep(_GRACE_SECONDS)
                    raise RankError(f"the block that this rank waited for failed on {word.decode()}")
            if not waiting:
                return
            if time.monotonic() > until:
                raise RankError(
                    f"the block that this rank waited for did not finish within {limit:g} s: pass a longer timeout."
                )
            time.sleep(next(waits))
    except dist.DistError as error:
        raise RankError(f"the store was lost while another rank was waited for: {error}") from error
