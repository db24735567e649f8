"""``open_memory``: the folders in the memory of the nodes for the snapshots of a launch, as its ranks open them."""

from __future__ import annotations

import shutil
from collections.abc import Callable

from ..checkpoint.deletion import clean_own
from ..checkpoint.node_folders import NodeFolders, gather_newest
from ..distributed.world import World
from ..system.environment import error_dir
from .restart_policy import fits, memory_of

_FIT = "fit_{}"


def open_memory(world: World, note: Callable[[str], None], name: str | None = None) -> NodeFolders | None:
    """Open the folders of the snapshots of a loop, the same in every attempt; None if a node has none. Collective.

    Removes the folders of the attempt's earlier fits, which have ended or whose errors the program has caught, and what
    killed ranks have left of snapshots. Afterwards every node holds the newest snapshot.

    Args:
        world: the ranks.
        note: called on rank 0 with a sentence about each snapshot that is lost.
        name: the name of the folder, by default that of the next fit.
    """
    records = error_dir()
    own = None if records is None else memory_of(records)
    # The fits are recorded on node 0.
    every = world.all_gather_object((own is not None, 0 if own is None or records is None else len(fits(records))))
    if own is None or not all(has_memory for has_memory, _ in every):
        return None
    number = every[0][1]
    nodes = NodeFolders(world, own / (name or _FIT.format(number)))
    if nodes.leads:
        for earlier in range(0 if name else number):
            shutil.rmtree(own / _FIT.format(earlier), ignore_errors=True)
        nodes.folder.mkdir(exist_ok=True)
        clean_own(nodes.folder, note)
    gather_newest(world, nodes, note)
    return nodes
