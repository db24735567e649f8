"""``open_memory``: the folders in the memory of the nodes for the snapshots of a launch, as its ranks open them."""

from __future__ import annotations

import shutil
from collections.abc import Callable

from ..checkpoint.deletion import clean_own
from ..checkpoint.node_folders import NodeFolders, gather_newest
from ..distributed.world import World
from ..system.environment import error_dir, ranks_are_restarted
from .restart_policy import fits, memory_of, num_loops, record_loop


def open_memory(world: World, note: Callable[[str], None], is_loop: bool = False) -> NodeFolders | None:
    """Open the folders for the snapshots of the next fit, the same in every attempt. Collective.

    Removes the folders of the attempt's earlier fits, which have ended or whose errors the program has caught, and what
    killed ranks have left of snapshots. Afterwards every node holds the newest snapshot.

    Args:
        note: called with a sentence about each snapshot that is lost.
        is_loop: whether it is a loop of a Fabric. Those before keep their folders: a script that is run again continues
            each from its end, as it may have saved nothing else.

    Returns:
        The folders; None if the launch has no memory for snapshots on a node.
    """
    records = error_dir()
    own = None if records is None else memory_of(records)
    number = 0
    if own is not None and records is not None:
        number = num_loops(records) if is_loop else len(fits(records))
    every = world.all_gather_object((own is not None, number, ranks_are_restarted()))
    if own is None or records is None or not all(has_memory for has_memory, _, _ in every):
        return None
    # Fits and loops are recorded on node 0.
    number = every[0][1]
    nodes = NodeFolders(world, own / f"{'loop' if is_loop else 'fit'}_{number}")
    if world.is_global_zero and is_loop:
        record_loop(records)
    if nodes.leads:
        for earlier in range(0 if is_loop else number):
            shutil.rmtree(own / f"fit_{earlier}", ignore_errors=True)
        nodes.folder.mkdir(exist_ok=True)
        clean_own(nodes.folder, note)
    # The options of other launchers may differ.
    nodes.serves_restarts = every[0][2]
    nodes.is_usable = gather_newest(world, nodes, note)
    return nodes
