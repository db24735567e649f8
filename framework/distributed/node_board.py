"""``share_board``: builds the ``Board`` through which the ranks of a group sum a few numbers.

On several nodes a sum has two levels. The ranks are divided into columns, each of which has a rank on every node; there
are as many columns as the smallest node has ranks. The ranks of a column sum over gloo, all columns at the same time,
and one of them on each node writes the result to the board of its node. Every rank adds the columns of its own board.
Compared with one ring over all ranks, the ring of a column has as many members as there are nodes.

No rank leads: a reduction is under way on every rank as soon as it has started there, whatever the other ranks of its
node are doing. A leader would have to wait for them, in a thread of its own.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .object_frames import all_gather_object
from .rendezvous import shared_store
from .shared_memory_reduce import TOKEN_BYTES, Board, Node, SharedMemory

_NAMESPACES = ("pid", "net")


def this_node() -> tuple[str, ...]:
    """Return a value that processes share if they can open one another's memory and are on one host."""
    known = [socket.gethostname()]
    with contextlib.suppress(OSError):
        known.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        # Containers of one host have the same boot, but other processes.
        known += [os.readlink(f"/proc/self/ns/{name}") for name in _NAMESPACES]
    return tuple(known)


def share_board(group: dist.ProcessGroup, name: tuple[str, ...] | None = None) -> Board | None:
    """Return the board of a group's ranks, on one node or on several; ``None`` leaves sums to gloo. Collective.

    Ranks with the same ``name``, by default ``this_node()``, are on one node. There is no board if a rank cannot open
    the memory of its node, and if a node has a single rank while there are others: the one column would be the whole
    group.
    """
    names = all_gather_object(name or this_node(), group)
    nodes = [[rank for rank, name in enumerate(names) if name == each] for each in dict.fromkeys(names)]
    columns = min(map(len, nodes))
    if columns == 1:
        return None
    own = next(ranks for ranks in nodes if group.rank() in ranks)
    found = _open_memory(group, own)
    if found is None:
        return None
    memory, pids = found
    node = Node(own, [pids[rank] for rank in own], columns)
    index = own.index(group.rank())
    members = sorted(rank for ranks in nodes for rank in ranks[index % columns :: columns])
    return Board(memory, index, node, _join_column(group, members, index % columns))


def _open_memory(group: dist.ProcessGroup, own: Sequence[int]) -> tuple[SharedMemory, list[int]] | None:
    """Return the memory that this rank shares with the ranks ``own``, and the pids of all ranks. Collective.

    None if a rank, of whichever node, cannot open the memory of its node.
    """
    size, is_first = Board.size(len(own)), group.rank() == own[0]
    token, memory = os.urandom(TOKEN_BYTES), None
    if is_first:
        with contextlib.suppress(OSError):
            memory = SharedMemory(size)
            memory.bytes[-TOKEN_BYTES:] = token
    offers = all_gather_object(None if memory is None else (memory.place, token), group)
    offer = offers[own[0]]
    if offer is not None and memory is None:
        with contextlib.suppress(OSError, ValueError):
            memory = SharedMemory(size, offer[0])
    # In another container the same pid may belong to another process, with other memory.
    known = memory is not None and offer is not None and memory.bytes[-TOKEN_BYTES:] == offer[1]
    answers = all_gather_object((known, os.getpid()), group)
    if memory is None:
        return None
    memory.release_name()
    if all(good for good, _ in answers):
        return memory, [pid for _, pid in answers]
    memory.close()
    return None


def _join_column(group: dist.ProcessGroup, members: list[int], column: int) -> Any:
    """Return the gloo group of the ranks of this rank's column, None if it is alone in it. Collective."""
    if len(members) == 1:
        return None
    timeout = dist.constants.default_pg_timeout
    # Not by ``dist.new_group``, which all ranks would have to call once for each column.
    store = dist.PrefixStore(f"phalanx/columns/{group.group_name}/{column}", shared_store())  # type: ignore[attr-defined]
    return dist.ProcessGroupGloo(store, members.index(group.rank()), len(members), timeout)
