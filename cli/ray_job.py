"""``ray_job``: the driver of a job for Ray."""

from __future__ import annotations

from ..framework.core.errors import Preempted
from .job import LAUNCHER, Job

_IMPORTS = """
import os
import socket
import subprocess
import sys

import ray
from ray.util import get_node_ip_address
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from phalanx.framework.system.processes import die_with_parent

"""
_FUNCTIONS = '''

class Node:
    """Runs the launcher of one node."""

    def address(self):
        with socket.create_server(("", 0)) as free:
            return f"{get_node_ip_address()}:{free.getsockname()[1]}"

    def run(self, rank, address, directory):
        several = ["--nodes", str(NODES), "--node-rank", str(rank), "--rdzv", address] if NODES > 1 else []
        command = [sys.executable, *LAUNCH, *several, *SCRIPT]
        # The working directory is shared, or else Ray has copied it. Ray may kill this process alone.
        place = directory if os.path.isdir(directory) else None
        return subprocess.run(command, cwd=place, preexec_fn=die_with_parent()).returncode


def run_once():
    """Run the script on all nodes; return its exit code, or LOST if Ray lost a node."""
    group = placement_group([RESOURCES] * NODES, strategy="STRICT_SPREAD")
    try:
        if not group.wait(WAIT_SECONDS):
            print(f"the run waits for {NODES} nodes with {RESOURCES} each", flush=True)
        ray.get(group.ready())
        nodes = [
            ray.remote(Node)
            .options(
                num_cpus=RESOURCES["CPU"],
                num_gpus=RESOURCES.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
            )
            .remote()
            for rank in range(NODES)
        ]
        address = ray.get(nodes[0].address.remote())
        # The launchers agree on an exit code.
        return max(ray.get([node.run.remote(rank, address, os.getcwd()) for rank, node in enumerate(nodes)]))
    except ray.exceptions.RayActorError:
        return LOST
    finally:
        remove_placement_group(group)


def main():
    ray.init()
    losses = 0
    while True:
        code = run_once()
        if code == LOST:
            losses += 1
            if losses > MAX_LOSSES:
                return FAILED
        elif code != PREEMPTED:
            return code
        print("the run is started again, from its newest checkpoint", flush=True)


if __name__ == "__main__":
    sys.exit(main())
'''


def ray_job(job: Job) -> str:
    """Return a script that runs a launcher on each node of a Ray cluster, and runs them again after a preemption."""
    resources = {"CPU": job.devices, **({"GPU": job.gpus} if job.gpus else {})}
    return f'''"""A job for Ray: {job.name}. Its exit code is that of the run."""
{_IMPORTS}NODES = {job.nodes}
# For each node.
RESOURCES = {resources!r}
# The launcher and its options; the script and its arguments.
LAUNCH = {[*LAUNCHER, *job.options]!r}
SCRIPT = {job.program!r}
# Losses of a node after which the run is started again.
MAX_LOSSES = {job.max_restarts}
WAIT_SECONDS = 10
PREEMPTED, FAILED = {Preempted.exit_code}, 1
# In place of an exit code.
LOST = -1
{_FUNCTIONS}'''
