"""``launch_ranks``: runs a script on the ranks of this node, beside those of other nodes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from ..framework.core.accelerators import accelerator_type, num_devices
from ..framework.core.errors import ConfigurationError
from ..framework.launch import launch_script
from ..framework.launch.launch_context import NodeOptions
from ..framework.launch.nodes import Nodes
from ..framework.launch.several_nodes import SeveralNodes
from ..framework.system.entry_script import Script
from ..framework.system.environment import environment_placement, query_devices_by_nvml


def launch_ranks(
    script: str,
    arguments: Sequence[str],
    num_ranks: int | None,
    max_restarts: int,
    several: NodeOptions | None,
) -> NoReturn:
    """Run a script once for each rank of this node, and end with the exit code of the run.

    Args:
        num_ranks: the number of ranks on this node; None for one on each GPU, or one on a machine without.
        several: the nodes of the run; None for a single one.

    Raises:
        SystemExit: the ranks have ended.
        ConfigurationError: this process is itself a rank, or the address of node 0 cannot be used.
    """
    place = environment_placement()
    if place.launcher in ("phalanx", "torchrun"):
        raise ConfigurationError(
            f"{place.launcher} has started this process as rank {place.rank} of {place.size}, and phalanx launch "
            "starts ranks itself: run it directly."
        )
    if num_ranks is None:
        query_devices_by_nvml()
        num_ranks = max(1, num_devices(accelerator_type() or "cpu"))
    nodes = Nodes() if several is None else SeveralNodes(several, num_ranks)
    entry = Script([sys.executable], os.path.abspath(script), False, list(arguments))
    # Whether the script takes snapshots is not known here.
    launch_script(num_ranks, max_restarts, script=entry, nodes=nodes, snapshots=True)
